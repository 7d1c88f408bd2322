# SPDX-License-Identifier: Apache-2.0
# Headers, versioned shared library, program, CMake package (weft::weft) and pkg-config file.

include(CMakePackageConfigHelpers)

install(TARGETS weft EXPORT weft LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET weft_cli)
    install(TARGETS weft_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(DIRECTORY include/weft DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")

# The library has no dependencies that a user must find, so the exported targets are the whole package file.
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/weft)
install(EXPORT weft NAMESPACE weft:: FILE weftConfig.cmake DESTINATION ${package_dir})
write_basic_package_version_file(weftConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/weftConfigVersion.cmake DESTINATION ${package_dir})

# Paths relative to the file itself: an installed tree may be moved or staged with DESTDIR.
file(RELATIVE_PATH prefix_from_pc /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
string(REGEX REPLACE "/$" "" prefix_from_pc ${prefix_from_pc})
configure_file(cmake/weft.pc.in weft.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/weft.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
