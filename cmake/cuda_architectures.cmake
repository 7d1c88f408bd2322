# SPDX-License-Identifier: Apache-2.0
# Which GPUs the CUDA backend is compiled for. Functions only, so that a script can include them (tests/cuda_architectures.cmake).

# The code in a library for all GPUs. 8.0 also as PTX, which the driver compiles for GPUs that there is no machine code for.
set(WEFT_CUDA_ALL 80 86-real 89-real 90a-real 100-real 120-real)
# The nvcc that first knows them.
set(WEFT_NVCC_OF_80 11.0)
set(WEFT_NVCC_OF_86 11.1)
set(WEFT_NVCC_OF_89 11.8)
set(WEFT_NVCC_OF_90a 12.0)
set(WEFT_NVCC_OF_100 12.8)
set(WEFT_NVCC_OF_120 12.8)

# weft_cuda_capabilities(<result> <nvidia-smi>): compute capabilities of the GPUs of this machine, e.g. 8.6;9.0, or nothing.
function(weft_cuda_capabilities result nvidia_smi)
    set(lines "")
    if(nvidia_smi)
        execute_process(COMMAND ${nvidia_smi} --query-gpu=compute_cap --format=csv,noheader RESULT_VARIABLE status
                        OUTPUT_VARIABLE lines ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE TIMEOUT 60)
        if(NOT status STREQUAL "0")
            set(lines "")
        endif()
    endif()
    string(REPLACE "\n" ";" lines "${lines}")
    list(FILTER lines INCLUDE REGEX "^ *[0-9]+\\.[0-9] *$")
    string(REPLACE " " "" lines "${lines}")
    list(REMOVE_DUPLICATES lines)
    list(SORT lines COMPARE NATURAL)
    set(${result} "${lines}" PARENT_SCOPE)
endfunction()

# weft_cuda_code_of(<result> <capability> <known>): which of the known architectures runs on a GPU, e.g. 8.7 -> 86-real. Machine code
# runs where the major number is its own and the minor one is not smaller, and code with an "a" on exactly its own.
function(weft_cuda_code_of result capability known)
    string(REPLACE "." "" asked ${capability})
    set(best "")
    foreach(arch IN LISTS known)
        string(REGEX MATCH "^([0-9]+)([0-9])(a?)" unused ${arch})
        set(number ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
        if(asked EQUAL number OR (asked GREATER number AND asked LESS_EQUAL ${CMAKE_MATCH_1}9 AND NOT CMAKE_MATCH_3))
            set(best ${number}${CMAKE_MATCH_3}-real)
        endif()
    endforeach()
    if(NOT best AND asked GREATER 80)
        set(best 80-virtual)
    endif()
    set(${result} "${best}" PARENT_SCOPE)
endfunction()

# weft_cuda_architectures(<result> <asked> <capabilities> <version of nvcc>): the list to compile for. <asked> is "native": what
# a library for all GPUs would run on those with the given capabilities, or one architecture where there are none; "all": as
# much as nvcc knows; or a list, which stays as it is.
function(weft_cuda_architectures result asked capabilities nvcc)
    set(known "")
    foreach(arch IN LISTS WEFT_CUDA_ALL)
        string(REGEX REPLACE "-.*" "" number ${arch})
        if(nvcc VERSION_GREATER_EQUAL WEFT_NVCC_OF_${number})
            list(APPEND known ${arch})
        endif()
    endforeach()
    if(asked STREQUAL "all")
        set(list ${known})
    elseif(asked STREQUAL "native")
        set(list "")
        foreach(capability IN LISTS capabilities)
            weft_cuda_code_of(code ${capability} "${known}")
            list(APPEND list ${code})
        endforeach()
        list(REMOVE_DUPLICATES list)
        if(NOT list AND "90a-real" IN_LIST known)
            set(list 90a-real)
        elseif(NOT list)
            set(list 80)
        endif()
    else()
        set(list "${asked}")
    endif()
    set(${result} "${list}" PARENT_SCOPE)
endfunction()
