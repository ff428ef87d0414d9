// Compares quotient(), quotient_of_large() and a Divisor's with a division of integers, where they are exact:
// at every edge of a quotient, and at random.
//   quotients RANDOM
// Prints how many were equal. On the first that is not, that line names it, and the exit code is 1.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "algorithms/quotient.h"
#include "instances.h"

namespace {

constexpr int64_t kMostQuotient = (int64_t(1) << 51) - 1;

int64_t compared = 0;

void expect(int64_t x, int64_t d, int64_t got) {
  ++compared;
  if (got == x / d) return;
  std::printf("%lld / %lld is %lld, not %lld\n", (long long)x, (long long)d, (long long)(x / d),
              (long long)got);
  std::exit(1);
}

void compare(int64_t x, int64_t d) {
  if (x < 0 || x / d > kMostQuotient) return;
  expect(x, d, isoload::quotient_of_large(x, d));
  if (x <= (int64_t(1) << 53) - d) expect(x, d, isoload::quotient(x, d));
  if (x <= INT32_MAX && d <= INT32_MAX)
    expect(x, d, isoload::Divisor(static_cast<int>(d)).quotient(static_cast<int>(x)));
}

// What lies beside powers of two and beside INT32_MAX, up to `most`.
std::vector<int64_t> edges(int64_t most) {
  std::vector<int64_t> found;
  for (int bit = 0; bit < 63; ++bit)
    for (int64_t beside = -2; beside <= 2; ++beside)
      if (const int64_t v = (int64_t(1) << bit) + beside; v > 0 && v <= most) found.push_back(v);
  for (int64_t v = 3; v <= most && v < 5000; v = v * 5 / 3 + 1) found.push_back(v);
  return found;
}

void compare_beside(int64_t q, int64_t d) {
  if (q > (INT64_MAX - d) / d) return;
  for (int64_t rest : {int64_t(-2), int64_t(-1), int64_t(0), int64_t(1), d / 2, d - 1})
    compare(q * d + rest, d);
}

}  // namespace

int main(int, char** arguments) {
  const std::vector<int64_t> divisors = edges(UINT32_MAX), quotients = edges(kMostQuotient);
  for (int64_t d : divisors)
    for (int64_t q : quotients) compare_beside(q, d);
  Rng rng(1);
  for (int i = std::atoi(arguments[1]); i > 0; --i) {
    const int64_t d = (rng.next() >> (33 + rng.below(31))) + 1;
    compare_beside(rng.next() >> (13 + rng.below(51)), d);
    compare(rng.next() >> (1 + rng.below(63)), d);
  }
  std::printf("%lld equal\n", (long long)compared);
}
