# The ROS messages and services. Sets PYTHON_INSTALL_DIR (ament_cmake_python); the generated Python package and ours have
# the same name and are installed over each other, so none of our modules may be called msg or srv.
find_package(ament_cmake_python REQUIRED)
find_package(rosidl_default_generators REQUIRED)
find_package(std_msgs REQUIRED)
file(GLOB interfaces RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS msg/*.msg srv/*.srv)
rosidl_generate_interfaces(${PROJECT_NAME} ${interfaces} DEPENDENCIES std_msgs)
ament_export_dependencies(rosidl_default_runtime std_msgs)
