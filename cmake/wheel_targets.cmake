# For ROS from PyPI wheels; passed by setup.py as CMAKE_PROJECT_INCLUDE, never seen by colcon.
# 1. The wheels export targets whose include directories lie on the machine that built them (/opt/python/...): drop these.
# 2. With the virtual environment inside the checkout, cmake refuses to export targets that mention its numpy: say that
#    those directories are for this build only.
function(spirula_repair_include_directories)
  string(REGEX REPLACE "([][+.*?^$()|\\])" "\\\\\\1" source "${PROJECT_SOURCE_DIR}")
  get_directory_property(imported IMPORTED_TARGETS)
  get_directory_property(built BUILDSYSTEM_TARGETS)
  foreach(target IN LISTS imported built)
    get_target_property(directories ${target} INTERFACE_INCLUDE_DIRECTORIES)
    if(directories)
      list(FILTER directories EXCLUDE REGEX "^/opt/python/")
      list(TRANSFORM directories REPLACE "^${source}/.*$" "$<BUILD_INTERFACE:\\0>")
      set_target_properties(${target} PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${directories}")
    endif()
  endforeach()
endfunction()
cmake_language(DEFER CALL spirula_repair_include_directories)
