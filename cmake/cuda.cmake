# SPDX-License-Identifier: Apache-2.0
# The CUDA backend. Sets WEFT_HAVE_CUDA, WEFT_CUDA_FLAGS, WEFT_CUDA_INCLUDE, WEFT_CUDA_LIBRARIES and WEFT_CUDA_CODE, the list that
# is compiled for; extends WEFT_HAVE.

include(cmake/cuda_architectures.cmake)

set(WEFT_HAVE_CUDA 0)
set(WEFT_CUDA_LIBRARIES "")
set(WEFT_CUDA_CODE "")
if(WEFT_SANITIZE)
    # The sanitizers look at host code; device code has compute-sanitizer (make gpu-record).
    set(WEFT_CUDA OFF)
endif()

if(NOT WEFT_CUDA STREQUAL "OFF")
    # What was found once stays where no GPU can be seen: a build folder may be used from machines with one and without.
    find_program(WEFT_NVIDIA_SMI nvidia-smi)
    weft_cuda_capabilities(found "${WEFT_NVIDIA_SMI}")
    if(found)
        set(WEFT_CUDA_CAPABILITIES "${found}" CACHE INTERNAL "compute capabilities of this machine's GPUs")
    endif()
endif()
if(WEFT_CUDA STREQUAL "AUTO")
    include(CheckLanguage)
    if(NOT CMAKE_CUDA_COMPILER AND EXISTS /usr/local/cuda/bin/nvcc)
        set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
    endif()
    check_language(CUDA)
    set(level STATUS)
    if(SKBUILD)
        set(level NOTICE) # pip -v shows both, but one among many lines is not seen
    endif()
    weft_cuda_choice(WEFT_CUDA why "${SKBUILD}" "${WEFT_CUDA_CAPABILITIES}" "${CMAKE_CUDA_COMPILER}")
    message(${level} "CUDA: ${why}")
endif()

if(WEFT_CUDA STREQUAL "ON")
    # The flags below name the architectures: CMake knows 90a only from 3.27 on, and nvcc's own defaults are of no use.
    set(CMAKE_CUDA_ARCHITECTURES OFF)
    set(CMAKE_CUDA_STANDARD 17)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_EXTENSIONS OFF)
    set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(WEFT_HAVE_CUDA 1)
    set(WEFT_CUDA_INCLUDE ${CUDAToolkit_INCLUDE_DIRS})
    # Static: the library loads on a machine without a GPU or a CUDA installation, and says so when it is asked for one.
    set(WEFT_CUDA_LIBRARIES CUDA::cudart_static)

    weft_cuda_architectures(WEFT_CUDA_CODE "${WEFT_CUDA_ARCHITECTURES}" "${WEFT_CUDA_CAPABILITIES}"
                            ${CMAKE_CUDA_COMPILER_VERSION})
    if(WEFT_CUDA_ARCHITECTURES STREQUAL "native" AND NOT WEFT_CUDA_CAPABILITIES)
        message(NOTICE "CUDA: no GPU here, so code for ${WEFT_CUDA_CODE} alone (CUDA_ARCH=all in make, "
                       "WEFT_CUDA_ARCHITECTURES=all in CMake: for all GPUs)")
    endif()

    if(SKBUILD)
        message(NOTICE "CUDA: compiling for ${WEFT_CUDA_CODE}; -C cmake.define.WEFT_CUDA_ARCHITECTURES=all is for all GPUs, or a list")
    endif()

    # Fused multiply-adds are written out here as well. Subnormals are kept, divisions and roots are correctly rounded.
    set(WEFT_CUDA_FLAGS --fmad=false --expt-relaxed-constexpr -Xcompiler=-fno-exceptions,-fno-rtti,-fno-threadsafe-statics,-Wall,-Wextra,-Wno-missing-field-initializers
                        -Xptxas=-warn-spills,-warn-lmem-usage --threads=1)
    # A seventh of the size. Every driver that runs code of this nvcc can read it, which is not so for earlier ones.
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)
        list(APPEND WEFT_CUDA_FLAGS --compress-mode=size)
    endif()
    foreach(arch IN LISTS WEFT_CUDA_CODE)
        string(REGEX REPLACE "-.*" "" number ${arch})
        if(NOT arch MATCHES "-virtual$")
            list(APPEND WEFT_CUDA_FLAGS "SHELL:-gencode arch=compute_${number},code=sm_${number}")
        endif()
        if(NOT arch MATCHES "-real$")
            list(APPEND WEFT_CUDA_FLAGS "SHELL:-gencode arch=compute_${number},code=compute_${number}")
        endif()
    endforeach()
endif()

list(APPEND WEFT_HAVE WEFT_HAVE_CUDA=${WEFT_HAVE_CUDA})
