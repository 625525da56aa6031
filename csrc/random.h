// Random numbers: a function of a key and an element's index; see codecs/rounding.py.
//
// Included inside the namespace of one instruction set, after packing.h.

// 32 random bits for the elements of a run; see codecs/rounding.py. All bits of an index but the
// lowest 16 are constants here, and so is what the first shift makes of them; so a run must not pass
// a multiple of 2^16.
struct Noise {
  uint32_t low, flip, add;

  static STQ_INLINE Noise of(uint64_t key, int64_t first) {
    const uint32_t low = uint32_t(first), flip = uint32_t(uint64_t(first) >> 32) * 0x9E3779B1u ^ uint32_t(key);
    return {low, flip ^ ((low ^ flip) >> 16), uint32_t(key >> 32)};
  }
  // Lower halves of the indices from the first on, and the bits of elements by theirs.
  template <class W>
  STQ_INLINE W indices() const {
    return numbers<W>() + low;
  }
  template <class W>
  STQ_INLINE W draw(W index) const {
    return drawn((index ^ flip) * kFirst, add);
  }

  static constexpr uint32_t kFirst = 0x21F0AAADu;
  // The random bits from the first of the two products.
  template <class W>
  static STQ_INLINE W drawn(W product, uint32_t add) {
    const W x = ((product ^ (product >> 15)) + add) * 0xD35A2D97u;
    return x ^ (x >> 15);
  }
};

// The same for a block of `count` that starts at a multiple of a vector's length: the first product
// of an element is the sum of one for its vector and one for its place in there.
template <int count, bool noisy>
struct BlockNoise {
  static constexpr uint32_t kPlaces = kWide - 1;
  WideWords places;
  alignas(64) uint32_t vectors[count / kWide];
  uint32_t add;

  static STQ_INLINE BlockNoise of(uint64_t key, int64_t first) {
    const Noise noise = Noise::of(key, first);
    BlockNoise block;
    block.places = (numbers<WideWords>() ^ (noise.flip & kPlaces)) * Noise::kFirst;
    for (int v = 0; v < count / kWide; v += kLanes) {
      const Words index = (numbers<Words>() + uint32_t(v)) * uint32_t(kWide) + noise.low;
      store(block.vectors + v, ((index ^ noise.flip) & ~kPlaces) * Noise::kFirst);
    }
    // From memory they are spread at no cost; compilers would keep them in a vector instead.
    __asm__("" : "+m"(block.vectors));
    block.add = noise.add;
    return block;
  }
  // Random bits of the vector that starts at element `i` of the block.
  STQ_INLINE WideWords draw(int i) const { return Noise::drawn(places + vectors[i / kWide], add); }
};

template <int count>
struct BlockNoise<count, false> {
  static STQ_INLINE BlockNoise of(uint64_t, int64_t) { return {}; }
  STQ_INLINE WideWords draw(int) const { return WideWords{}; }
};

// Whether the elements [first, first + count) pass a multiple of 2^16.
static STQ_INLINE bool wraps(int64_t first, int64_t count) { return (first ^ (first + count - 1)) >> 16; }

static void draw(uint64_t key, int64_t first, int count, uint32_t* out) {
  const int before = wraps(first, count) ? (1 << 16) - int(first & 0xFFFF) : count;
  const Noise noise = Noise::of(key, first), rest = Noise::of(key, first + before);
  const auto fill = [](const Noise& from, uint32_t* to, int n) __attribute__((always_inline)) {
    each(n, [&](int i, auto like) __attribute__((always_inline)) {
      store(to + i, from.draw(from.indices<Word<decltype(like)>>() + uint32_t(i)));
    });
  };
  fill(noise, out, before);
  fill(rest, out + before, count - before);
}

static void draw_chunk(uint64_t key, const Chunk& chunk, uint32_t* out) {
  for (int b = 0; b < chunk.blocks; ++b) draw(key, chunk.index[b], chunk.block, out + b * chunk.block);
}

// Whether `BlockNoise` serves all blocks of a chunk.
static bool draws_by_vector(const Chunk& chunk) {
  for (int b = 0; b < chunk.blocks; ++b)
    if (chunk.index[b] % kWide || wraps(chunk.index[b], chunk.block)) return false;
  return true;
}
