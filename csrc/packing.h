// Packing: the codes of a block as byte planes; the layout is that of codecs/packing.py.
//
// Included inside the namespace of one instruction set, after bytes.h.

// The codes of a lane (or of a vector of lanes) as one little-endian integer, in 32-bit words.
template <int bits, class F>
struct Lane {
  Word<F> word[bits == 0 ? 1 : (bits + 3) / 4] = {};

  static STQ_INLINE Lane load(const uint8_t* planes, int lanes) {
    Lane x;
    if constexpr (bits > 0) load_planes<(bits < 4 ? bits : 4)>(planes, lanes, x.word[0]);
    if constexpr (bits > 4) load_planes<(bits < 8 ? bits - 4 : 4)>(planes + 4 * lanes, lanes, x.word[1]);
    if constexpr (bits > 8) {
      load_planes<4>(planes + 8 * lanes, lanes, x.word[2]);
      load_planes<4>(planes + 12 * lanes, lanes, x.word[3]);
    }
    return x;
  }
  // Code j in the lower bits; those above are of the codes after it.
  template <int j>
  STQ_INLINE Int<F> get() const {
    constexpr int at = bits * j / 32, shift = bits * j % 32;
    Word<F> code = word[at] >> shift;
    if constexpr (shift + bits > 32) code |= word[at + 1] << (32 - shift);
    return as<Int<F>>(code);
  }
};

// Codes of 8 bits are the planes themselves.
template <class F>
struct Lane<8, F> {
  const uint8_t* planes;
  int lanes;

  static STQ_INLINE Lane load(const uint8_t* planes, int lanes) { return {planes, lanes}; }
  template <int j>
  STQ_INLINE Int<F> get() const {
    Word<F> x;
    load_bytes(planes + j * lanes, x);
    return as<Int<F>>(x);
  }
};

// Codes on their way to memory. Those below 0 are stored as 0, those above the last as the last; with
// `exact` there are none. With `apart` they are magnitudes, and the upper bit of a code is the sign of
// a value that is put beside it, if the magnitude is not 0.
template <int bits, class F, bool apart = false, bool exact = false>
struct Codes {
  static constexpr int32_t last = (1 << (bits - apart)) - 1;
  Int<F> code[8], value[8];

  template <int j>
  STQ_INLINE void put(Int<F> x) {
    code[j] = x;
  }
  template <int j>
  STQ_INLINE void put(Int<F> x, F like) {
    code[j] = x, value[j] = as<Int<F>>(like);
  }
  STQ_INLINE void store(uint8_t* planes, int lanes) const {
    // Codes of 7 bits have a weight that `joined` cannot hold.
    constexpr bool narrow = !exact && kNarrows<F> && bits <= 8 && bits != 7;
    if constexpr (narrow && bits > 0) store_narrowed<bits, apart>(planes, lanes, code, value);
    else if constexpr (bits > 0) store_words(planes, lanes);
  }

  STQ_INLINE Int<F> whole(int j) const {
    if constexpr (exact) return code[j];
    const Int<F> x = smaller(larger(code[j], 0), last);
    if constexpr (!apart) return x;
    return x | (signed_as(x, value[j]) & (last + 1));
  }
  STQ_INLINE void store_words(uint8_t* planes, int lanes) const {
    Word<F> word[(bits + 3) / 4] = {};
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const int at = bits * j / 32, shift = bits * j % 32;
      word[at] |= as<Word<F>>(whole(j)) << shift;
      if (shift + bits > 32) word[at + 1] |= as<Word<F>>(whole(j)) >> (32 - shift);
    }
    store_planes<(bits < 4 ? bits : 4)>(planes, lanes, word[0]);
    if constexpr (bits > 4) store_planes<(bits < 8 ? bits - 4 : 4)>(planes + 4 * lanes, lanes, word[1]);
    if constexpr (bits > 8) {
      store_planes<4>(planes + 8 * lanes, lanes, word[2]);
      store_planes<4>(planes + 12 * lanes, lanes, word[3]);
    }
  }
};

// A code of one bit may be a mask.
template <class F>
struct Codes<1, F> {
  Word<F> word = {};

  template <int j>
  STQ_INLINE void put(Mask<F> one) {
    word = with_bits(word, one, 1u << j);
  }
  template <int j>
  STQ_INLINE void put(Int<F> x) {
    word |= as<Word<F>>(x) << j;
  }
  STQ_INLINE void store(uint8_t* planes, int lanes) const { store_planes<1>(planes, lanes, word); }
};

// Calls visit(block, lanes) for each block, with a constant number of lanes where blocks are full
// and of the usual size.
template <class Visit>
static STQ_INLINE void each_block(const Chunk& chunk, Visit visit) {
  for (int b = 0; b < chunk.blocks; ++b) {
    if (chunk.count[b] == 128) {
      visit(b, 16);
    } else {
      visit(b, (chunk.count[b] + kCodesPerLane - 1) / kCodesPerLane);
    }
  }
}

// out[i] = map(code of element i, i) for the elements of a block. Above the code are bits of others.
template <int bits, class Map>
static STQ_INLINE void unpack_block(const uint8_t* planes, int lanes, float* out, Map map) {
  each(lanes, [&](int l, auto like) __attribute__((always_inline)) {
    using F = decltype(like);
    const auto x = Lane<bits, F>::load(planes + l, lanes);
    float* to = out + l;
    store(to, map(x.template get<0>(), l, like)), to += lanes;
    store(to, map(x.template get<1>(), l + 1 * lanes, like)), to += lanes;
    store(to, map(x.template get<2>(), l + 2 * lanes, like)), to += lanes;
    store(to, map(x.template get<3>(), l + 3 * lanes, like)), to += lanes;
    store(to, map(x.template get<4>(), l + 4 * lanes, like)), to += lanes;
    store(to, map(x.template get<5>(), l + 5 * lanes, like)), to += lanes;
    store(to, map(x.template get<6>(), l + 6 * lanes, like)), to += lanes;
    store(to, map(x.template get<7>(), l + 7 * lanes, like));
  });
}

// Packs map(i), the code of element i, for the elements of a block.
template <int bits, class Map>
static STQ_INLINE void pack_block(uint8_t* planes, int lanes, Map map) {
  each(lanes, [&](int l, auto like) __attribute__((always_inline)) {
    Codes<bits, decltype(like)> x;
    x.template put<0>(map(l, like));
    x.template put<1>(map(l + 1 * lanes, like));
    x.template put<2>(map(l + 2 * lanes, like));
    x.template put<3>(map(l + 3 * lanes, like));
    x.template put<4>(map(l + 4 * lanes, like));
    x.template put<5>(map(l + 5 * lanes, like));
    x.template put<6>(map(l + 6 * lanes, like));
    x.template put<7>(map(l + 7 * lanes, like));
    x.store(planes + l, lanes);
  });
}
