# The ROS messages, services and actions. Sets PYTHON_INSTALL_DIR (ament_cmake_python); the generated Python package and ours have
# the same name and are installed over each other, so none of our modules may be called msg, srv or action.
find_package(ament_cmake_python REQUIRED)
find_package(rosidl_default_generators REQUIRED)
set(used action_msgs geometry_msgs sensor_msgs std_msgs)
foreach(package ${used})
  find_package(${package} REQUIRED)
endforeach()
file(GLOB interfaces RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS action/*.action msg/*.msg srv/*.srv)
rosidl_generate_interfaces(${PROJECT_NAME} ${interfaces} DEPENDENCIES ${used})
ament_export_dependencies(rosidl_default_runtime ${used})
