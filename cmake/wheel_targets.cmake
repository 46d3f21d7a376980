# Passed by setup.py as CMAKE_PROJECT_INCLUDE, never seen by colcon. The PyPI wheels of ROS export targets whose include
# directories lie on the machine that built them (/opt/python/...), which cmake refuses; they are not needed: drop them.
function(spirula_drop_foreign_include_directories)
  get_directory_property(targets IMPORTED_TARGETS)
  foreach(target IN LISTS targets)
    get_target_property(directories ${target} INTERFACE_INCLUDE_DIRECTORIES)
    if(directories)
      list(FILTER directories EXCLUDE REGEX "^/opt/python/")
      set_target_properties(${target} PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${directories}")
    endif()
  endforeach()
endfunction()
cmake_language(DEFER CALL spirula_drop_foreign_include_directories)
