# SPDX-License-Identifier: Apache-2.0
# cmake -DWORK=<folder> -P tests/cuda_architectures.cmake: what is compiled for which GPUs, and what is made of nvidia-smi's words.

cmake_minimum_required(VERSION 3.21)
include(${CMAKE_CURRENT_LIST_DIR}/../cmake/cuda_architectures.cmake)

function(expect what got want)
    if(NOT "${got}" STREQUAL "${want}")
        message(SEND_ERROR "${what}: expected '${want}', got '${got}'")
    endif()
endfunction()

# <asked> <capabilities> <version of nvcc> <wanted>, lists with commas
foreach(case
        "native  9.0          13.0.88 90a-real"
        "native  8.0,8.6      13.0.88 80-real,86-real"
        "native  8.7          13.0.88 86-real"
        "native  8.6,8.9      11.4    86-real"
        "native  8.6          11.0    80-real"
        "native  8.9,9.0      12.9    89-real,90a-real"
        "native  10.0         12.8    100-real"
        "native  10.3         12.8    100-real"
        "native  10.3         12.6    80-virtual" # an nvcc that does not know it
        "native  9.0          11.8    80-virtual"
        "native  11.0         13.0.88 80-virtual" # no machine code of its major number
        "native  12.0,12.1    13.0.88 120-real"
        "native  12.0         12.6    80-virtual"
        "native  7.5,9.0      13.0.88 90a-real"   # there is no code for 7.5 at all
        "native  7.5          13.0.88 90a-real"
        "native  -            13.0.88 90a-real"
        "native  -            11.8    80"
        "all     -            13.0.88 80,86-real,89-real,90a-real,100-real,120-real"
        "all     9.0          12.4    80,86-real,89-real,90a-real"
        "all     -            11.8    80,86-real,89-real"
        "86-real 9.0          13.0.88 86-real"
        "80,90a  -            13.0.88 80,90a")
    string(REGEX REPLACE " +" ";" case "${case}")
    string(REPLACE "," "\\;" case "${case}")
    list(GET case 0 asked)
    list(GET case 1 capabilities)
    list(GET case 2 nvcc)
    list(GET case 3 want)
    string(REPLACE "-" "" capabilities "${capabilities}")
    weft_cuda_architectures(got "${asked}" "${capabilities}" ${nvcc})
    expect("${asked} on '${capabilities}' with nvcc ${nvcc}" "${got}" "${want}")
endforeach()

# what a program in the place of nvidia-smi prints -> capabilities
function(expect_of script want)
    file(WRITE ${WORK}/nvidia-smi "#!/bin/sh\n${script}\n")
    file(CHMOD ${WORK}/nvidia-smi PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
    weft_cuda_capabilities(got ${WORK}/nvidia-smi)
    expect("${script}" "${got}" "${want}")
endfunction()

expect_of("printf '9.0\\n9.0\\n'" "9.0")
expect_of("printf '10.0\\n9.0\\n8.6\\n'" "8.6;9.0;10.0")
expect_of("printf '[N/A]\\n9.0\\n'" "9.0")
expect_of("echo No devices were found" "")
expect_of("echo NVML library version: 535.104; exit 18" "")
expect_of("echo 9.0; exit 9" "")
expect_of("[ \"$*\" = '--query-gpu=compute_cap --format=csv,noheader' ] && echo 9.0" "9.0")
weft_cuda_capabilities(got WEFT_NVIDIA_SMI-NOTFOUND)
expect("no nvidia-smi" "${got}" "")

# <a package for pip> <capabilities> <nvcc> -> choice, and what the sentence must name
function(expect_choice for_pip capabilities nvcc want words)
    weft_cuda_choice(got why "${for_pip}" "${capabilities}" "${nvcc}")
    expect("pip '${for_pip}', GPUs '${capabilities}', nvcc '${nvcc}'" "${got}" ${want})
    if(NOT why MATCHES "${words}")
        message(SEND_ERROR "expected '${words}' in: ${why}")
    endif()
endfunction()

expect_choice("" "" "" OFF "no nvcc")
expect_choice("" "" /bin/nvcc ON "nvcc is here")
expect_choice("" "9.0" /bin/nvcc ON "nvcc is here")
expect_choice(2 "" /bin/nvcc OFF "no GPU here.*WEFT_CUDA=ON")
expect_choice(2 "" "" OFF "no GPU here")
expect_choice(2 "8.6;9.0" /bin/nvcc ON "GPU is here .8.6, 9.0.*WEFT_CUDA=OFF")
expect_choice(2 "9.0" CMAKE_CUDA_COMPILER-NOTFOUND OFF "no nvcc")
