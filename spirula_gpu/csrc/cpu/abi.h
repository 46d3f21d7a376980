// abi.h: the wall between C++ and the caller. Nothing is thrown across it; a failure becomes a status and a text.
#pragma once
#include <new>
#include "context.h"

namespace spl {
template <class F> int guarded(spl_ctx* c, F&& body) {
  if (!c) return SPL_E_ARGUMENT;
  try {
    body(*c);
    c->error.clear();
    return SPL_OK;
  } catch (const Failure& f) {
    c->phase = SPL_PHASE_ALWAYS;
    c->error = f.text;
    return f.status;
  } catch (const std::bad_alloc&) {
    c->phase = SPL_PHASE_ALWAYS;
    c->error = "the system is out of memory; lower engine.max_gaussians or the image size";
    return SPL_E_MEMORY;
  }
}
template <class T> const T& checked(const T* p, const char* name) {
  if (!p || p->struct_size != (int64_t)sizeof(T)) fail(SPL_E_ARGUMENT, "%s: NULL or struct_size is not %zu: library and caller differ", name, sizeof(T));
  return *p;
}
}  // namespace spl
