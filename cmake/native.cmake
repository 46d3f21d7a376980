# libspirula_cpu.so and, with a CUDA toolkit, libspirula_cuda.so: the same plain C ABI (spirula.h), loaded with ctypes.
set(csrc ${PROJECT_SOURCE_DIR}/spirula_gpu/csrc)

# One library. The CPU sources choose their SIMD width at run time (target_clones), so nothing here depends on the
# machine that builds; fast-math stays off because infinities and NaN are tested for.
function(spirula_library name)
  add_library(${name} SHARED ${ARGN})
  target_compile_features(${name} PRIVATE cxx_std_17)
  set_target_properties(${name} PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_compile_options(${name} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-O3 -fno-math-errno -fno-trapping-math -Wall -Wextra -Wno-psabi>)
  target_link_options(${name} PRIVATE -Wl,--version-script=${PROJECT_SOURCE_DIR}/cmake/exports.map)
  set_target_properties(${name} PROPERTIES LINK_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/exports.map)
  install(TARGETS ${name} LIBRARY DESTINATION ${PYTHON_INSTALL_DIR}/spirula_gpu/lib)
endfunction()

file(GLOB cpu_sources CONFIGURE_DEPENDS ${csrc}/cpu/*.cpp)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(Threads REQUIRED)
spirula_library(spirula_cpu ${cpu_sources})
target_link_libraries(spirula_cpu PRIVATE OpenMP::OpenMP_CXX Threads::Threads)
install(FILES ${csrc}/spirula.h DESTINATION ${PYTHON_INSTALL_DIR}/spirula_gpu/include)

# AUTO: with nvcc and a GPU on this machine, for that GPU. ON: always; without a GPU for a list of architectures. OFF: never.
file(GLOB cuda_sources CONFIGURE_DEPENDS ${csrc}/cuda/*.cu)
find_program(nvidia_smi nvidia-smi)
if(nvidia_smi OR EXISTS /dev/nvidiactl OR EXISTS /dev/nvhost-gpu OR EXISTS /dev/nvgpu) # the last two: Jetson
  set(gpu_here ON)
endif()
if(SPIRULA_CUDA STREQUAL "ON" OR (gpu_here AND NOT SPIRULA_CUDA STREQUAL "OFF"))
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    if(NOT CMAKE_CUDA_ARCHITECTURES AND gpu_here)
      set(CMAKE_CUDA_ARCHITECTURES native)
    elseif(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 75-real 80-real 87-real 90) # Turing, Ampere and Ada, Jetson Orin, Hopper; newer ones compile 90's PTX
    endif()
    enable_language(CUDA)
    spirula_library(spirula_cuda ${cuda_sources})
    target_compile_features(spirula_cuda PRIVATE cuda_std_17)
    set_target_properties(spirula_cuda PROPERTIES CUDA_VISIBILITY_PRESET hidden CUDA_RUNTIME_LIBRARY Static)
  elseif(SPIRULA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "SPIRULA_CUDA=ON, but there is no nvcc: install the CUDA toolkit, or set CUDACXX to its nvcc")
  else()
    message(WARNING "spirula_ros: there is a GPU but no nvcc: building the CPU backend alone. Install the CUDA toolkit, or set CUDACXX to its nvcc")
  endif()
else()
  message(STATUS "spirula_ros: building the CPU backend alone (SPIRULA_CUDA=${SPIRULA_CUDA}; AUTO takes CUDA where there is a GPU)")
endif()
