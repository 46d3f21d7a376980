// hot.h: loops that are compiled for three instruction sets and chosen when the library is loaded: one build runs everywhere.
#pragma once
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(SPL_NO_CLONES)
#if __GNUC__ >= 12
#define SPL_HOT __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else  // GCC 11 (Ubuntu 22.04) does not know the levels
#define SPL_HOT __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define SPL_HOT
#endif
