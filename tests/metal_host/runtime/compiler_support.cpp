// Conversions that the compiler calls and that the process it is loaded into may lack.

namespace metal_host {
namespace {

unsigned bits_of(float value) { return __builtin_bit_cast(unsigned, value); }

/// Rounds to nearest, ties to even; a NaN stays one.
unsigned short to_bfloat(float value) {
  unsigned bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return (unsigned short)(bits >> 16 | 0x40);
  return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/// Rounds to odd, so that rounding once more gives what rounding once would have.
float to_float_odd(double value) {
  float nearest = (float)value;
  if ((double)nearest == value || value != value || __builtin_isinf(nearest)) return nearest;
  unsigned bits = bits_of(nearest);
  bool away = __builtin_fabs((double)nearest) > __builtin_fabs(value);
  return __builtin_bit_cast(float, (bits - away) | 1);
}

}  // namespace

// The calling convention returns a bfloat in a vector register.
extern "C" __bf16 __truncsfbf2(float value) { return __builtin_bit_cast(__bf16, to_bfloat(value)); }

extern "C" __bf16 __truncdfbf2(double value) {
  return __builtin_bit_cast(__bf16, to_bfloat(to_float_odd(value)));
}

}  // namespace metal_host
