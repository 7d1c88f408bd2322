# SPDX-License-Identifier: Apache-2.0
# Compilers, instruction sets and their flags. Sets WEFT_HAVE_X86, WEFT_HAVE_AMX and the WEFT_*_FLAGS lists.

include(CheckCCompilerFlag)
include(CheckCSourceCompiles)

set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

set(WEFT_WARNINGS -Wall -Wextra -Wpedantic -Wshadow)
if(WEFT_WERROR)
    list(APPEND WEFT_WARNINGS -Werror)
endif()

# Fused multiply-adds are written out where they are meant: results must not depend on what a compiler contracts.
add_compile_options(-ffp-contract=off -fno-semantic-interposition)

set(WEFT_O2 -O2)
set(WEFT_O3 -O3 -fno-tree-vectorize)
if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
    # gcc 12.2 drops live stores to arrays of vectors in its dead store elimination on RTL: elements of a Sinkhorn matrix
    # kept their old values (test_mhc_sinkhorn on AVX2 shows it). clang is right, and so is gcc without that pass.
    list(APPEND WEFT_O3 -fno-dse)
endif()
# Threads of the OpenMP runtime outlive a call. A library that dlclose could unmap would take the runtime with it, and the code that
# these threads run.
set(WEFT_KEEP_LOADED -Wl,-z,nodelete)
set(WEFT_SHARED_LINK_FLAGS -Wl,--no-undefined)
if(WEFT_SANITIZE)
    # -O1 keeps compile time and stack traces bearable. A shared library finds the sanitizer's runtime in the program,
    # so undefined symbols are in order there.
    set(WEFT_O2 -O1)
    set(WEFT_O3 -O1)
    set(WEFT_SHARED_LINK_FLAGS "")
    add_compile_options(-O1 -g1 -fno-omit-frame-pointer -fsanitize=${WEFT_SANITIZE} -fno-sanitize-recover=all)
    add_link_options(-fsanitize=${WEFT_SANITIZE})
endif()
if(WEFT_FUZZ)
    # Everything is instrumented, so that the fuzzer sees the library's branches too; only the targets link its driver.
    add_compile_options(-fsanitize=fuzzer-no-link)
endif()

set(WEFT_CPU_FLAGS ${WEFT_O3} -fno-math-errno -fno-trapping-math)
set(WEFT_AVX2_FLAGS -mavx2 -mfma -mf16c)
set(WEFT_AVX512_FLAGS -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mfma -mf16c -mprefer-vector-width=512)
set(WEFT_AMX_FLAGS -mamx-tile -mamx-bf16)

check_c_source_compiles("#ifndef __x86_64__\n#error\n#endif\nint main(void) { return 0; }" WEFT_TARGET_IS_X86)
set(WEFT_HAVE_X86 0)
set(WEFT_HAVE_AMX 0)
if(WEFT_TARGET_IS_X86)
    set(WEFT_HAVE_X86 1)
    string(REPLACE ";" " " flags "${WEFT_AMX_FLAGS}")
    check_c_compiler_flag("${flags}" WEFT_COMPILER_HAS_AMX)
    if(WEFT_COMPILER_HAS_AMX)
        set(WEFT_HAVE_AMX 1)
    endif()
endif()

list(APPEND WEFT_HAVE WEFT_HAVE_X86=${WEFT_HAVE_X86} WEFT_HAVE_AMX=${WEFT_HAVE_AMX})

if(WEFT_OPENMP)
    find_package(OpenMP COMPONENTS C)
    if(NOT OpenMP_C_FOUND)
        message(WARNING "OpenMP was not found: the CPU backend will use one thread per call.")
    endif()
endif()
