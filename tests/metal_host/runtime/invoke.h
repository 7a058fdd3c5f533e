// Calls a kernel with arguments made from a launch's buffers and a thread's position.
// Included after the kernel's source, by the text that signature.py writes.
#pragma once

#include "position.h"

namespace metal_host {

/// The number of components of a position, and how to make one of another size or type.
template <class T>
struct Components {
  static T make(const unsigned* at, unsigned) { return T(at[0]); }
};

template <class E, int N>
struct Components<metal::vec<E, N>> {
  // A vector of an attribute that has one component (or two) is an error in Metal too.
  static metal::vec<E, N> make(const unsigned* at, unsigned count) {
    metal::vec<E, N> result = {};
    for (unsigned i = 0; i < N && i < count; ++i) result[i] = E(at[i]);
    return result;
  }
};

template <class T>
struct Argument {
  template <unsigned N>
  static T make(const unsigned (&at)[N]) {
    return Components<T>::make(at, N);
  }
};

template <class T>
struct Argument<T*> {
  static T* make(void* data) { return (T*)data; }
};

template <class T>
struct Argument<T&> {
  static T& make(void* data) { return *(T*)data; }
};

template <class... Parameters, class... Sources>
void invoke(void (*function)(Parameters...), Sources&&... sources) {
  function(Argument<Parameters>::make(sources)...);
}

}  // namespace metal_host
