package fastps

import (
	"encoding/binary"
	"math"
	"math/bits"

	pb "fastps.example/go/fastpsv1"
)

// Codec encodes the values of a push; the zero value is Float32. The bytes are in section 7 of protos/README.md.
type Codec struct {
	id     pb.PayloadCodec
	seed   uint64
	random bool
}

// The codecs. OneBit needs error feedback.
var (
	Float32  = Codec{id: pb.PayloadCodec_CODEC_FLOAT32}
	BFloat16 = Codec{id: pb.PayloadCodec_CODEC_BFLOAT16}
	Int8     = Codec{id: pb.PayloadCodec_CODEC_INT8}
	OneBit   = Codec{id: pb.PayloadCodec_CODEC_ONEBIT}
	FourBit  = Codec{id: pb.PayloadCodec_CODEC_FOURBIT}
)

// StochasticInt8 is Int8 with random rounding, whose expectation is the value itself.
func StochasticInt8(seed uint64) Codec {
	return Codec{id: pb.PayloadCodec_CODEC_INT8, seed: seed, random: true}
}

const (
	int8Block    = 64
	onebitBlock  = 1024
	fourbitBlock = 64
	// Blocks whose largest exponent field is below this one (magnitudes below 2^-95) become zero.
	smallestExponent = 32
)

func ceil(n, block int) int { return (n + block - 1) / block }

func (c Codec) number() pb.PayloadCodec {
	if c.id == 0 {
		return pb.PayloadCodec_CODEC_FLOAT32
	}
	return c.id
}

func (c Codec) name() string {
	switch c.number() {
	case pb.PayloadCodec_CODEC_BFLOAT16:
		return "BFloat16"
	case pb.PayloadCodec_CODEC_INT8:
		return "Int8"
	case pb.PayloadCodec_CODEC_ONEBIT:
		return "OneBit"
	case pb.PayloadCodec_CODEC_FOURBIT:
		return "FourBit"
	}
	return "Float32"
}

func (c Codec) bodyLen(n int) int {
	switch c.number() {
	case pb.PayloadCodec_CODEC_BFLOAT16:
		return 2 * n
	case pb.PayloadCodec_CODEC_INT8:
		return ceil(n, int8Block) + n
	case pb.PayloadCodec_CODEC_ONEBIT:
		return 8*ceil(n, onebitBlock) + ceil(n, 8)
	case pb.PayloadCodec_CODEC_FOURBIT:
		return ceil(n, fourbitBlock) + ceil(n, 2)
	}
	return 4 * n
}

// append appends the body of finite values. For random rounding, first is the index in the tensor of the first
// element, and sequence the number of the push.
func (c Codec) append(body []byte, values []float32, first, sequence uint64) []byte {
	if littleEndian && c.number() == pb.PayloadCodec_CODEC_FLOAT32 {
		return append(body, bytesOf(values)...)
	}
	at := len(body)
	body = append(body, make([]byte, c.bodyLen(len(values)))...)
	into := body[at:]
	switch c.number() {
	case pb.PayloadCodec_CODEC_BFLOAT16:
		for i, x := range values {
			binary.LittleEndian.PutUint16(into[2*i:], bfloat16(x))
		}
	case pb.PayloadCodec_CODEC_INT8:
		c.putInt8(into, values, first, sequence)
	case pb.PayloadCodec_CODEC_ONEBIT:
		putOneBit(into, values)
	case pb.PayloadCodec_CODEC_FOURBIT:
		putFourBit(into, values)
	default:
		putFloats(into, values)
	}
	return body
}

// decode writes the values of a body that this package has encoded.
func (c Codec) decode(body []byte, values []float32) {
	switch c.number() {
	case pb.PayloadCodec_CODEC_BFLOAT16:
		for i := range values {
			values[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(body[2*i:])) << 16)
		}
	case pb.PayloadCodec_CODEC_INT8:
		elements := body[ceil(len(values), int8Block):]
		for i := range values {
			values[i] = 0
			if scale := int(body[i/int8Block]); scale > 0 {
				values[i] = float32(math.Ldexp(float64(int8(elements[i])), scale-133))
			}
		}
	case pb.PayloadCodec_CODEC_ONEBIT:
		signs := body[8*ceil(len(values), onebitBlock):]
		for i := range values {
			mean := 8 * (i / onebitBlock)
			if signs[i/8]>>(i%8)&1 == 1 {
				values[i] = -math.Float32frombits(binary.LittleEndian.Uint32(body[mean+4:]))
			} else {
				values[i] = math.Float32frombits(binary.LittleEndian.Uint32(body[mean:]))
			}
		}
	case pb.PayloadCodec_CODEC_FOURBIT:
		pairs := body[ceil(len(values), fourbitBlock):]
		for i := range values {
			values[i] = 0
			element := uint32(pairs[i/2]) >> (4 * (i % 2)) & 15
			if code := element & 7; code > 0 {
				power := uint32(body[i/fourbitBlock]) - 7 + code
				values[i] = math.Float32frombits(element>>3<<31 | power<<23)
			}
		}
	default:
		getFloats(body, values)
	}
}

// bfloat16 rounds to nearest, ties to even; a value that would become infinite becomes the largest finite one.
func bfloat16(x float32) uint16 {
	all := math.Float32bits(x)
	magnitude := uint64(all & 0x7FFFFFFF)
	rounded := min((magnitude+0x7FFF+magnitude>>16&1)>>16, 0x7F7F)
	return uint16(rounded) | uint16(all>>16)&0x8000
}

// exponent is the exponent field of the largest magnitude.
func exponent(values []float32) int {
	largest := uint32(0)
	for _, x := range values {
		largest = max(largest, math.Float32bits(x)&0x7FFFFFFF)
	}
	return int(largest >> 23)
}

func (c Codec) putInt8(into []byte, values []float32, first, sequence uint64) {
	elements := into[ceil(len(values), int8Block):]
	for block := 0; block*int8Block < len(values); block++ {
		from := block * int8Block
		part := values[from:min(from+int8Block, len(values))]
		e := exponent(part)
		if e < smallestExponent {
			continue
		}
		into[block] = byte(e)
		// A float32 times a power of two is exact in float64.
		factor := math.Ldexp(1, 133-e)
		for i, x := range part {
			var q int
			if c.random {
				u := philoxHalf(c.seed, first+uint64(from+i), sequence)
				q = (int(math.Floor(float64(x)*factor*65536)) + int(u)) >> 16
			} else {
				q = int(math.RoundToEven(float64(x) * factor))
			}
			elements[from+i] = byte(int8(max(-127, min(127, q))))
		}
	}
}

// philoxHalf is the 16 random bits of one element: Philox4x32-10 (Salmon et al., SC 2011) with the counter
// (element / 8, sequence), of whose four words each serves two elements.
func philoxHalf(key, element, sequence uint64) uint32 {
	counter := element / 8
	x := [4]uint32{uint32(counter), uint32(counter >> 32), uint32(sequence), uint32(sequence >> 32)}
	k0, k1 := uint32(key), uint32(key>>32)
	for range 10 {
		ahi, alo := bits.Mul32(x[0], 0xD2511F53)
		bhi, blo := bits.Mul32(x[2], 0xCD9E8D57)
		x = [4]uint32{bhi ^ x[1] ^ k0, blo, ahi ^ x[3] ^ k1, alo}
		k0 += 0x9E3779B9
		k1 += 0xBB67AE85
	}
	half := element % 8
	return x[half/2] >> (16 * (half % 2)) & 0xFFFF
}

func putOneBit(into []byte, values []float32) {
	signs := into[8*ceil(len(values), onebitBlock):]
	for block := 0; block*onebitBlock < len(values); block++ {
		from := block * onebitBlock
		part := values[from:min(from+onebitBlock, len(values))]
		e := exponent(part)
		factor := math.Ldexp(1, 150-e)
		var sums, counts [2]uint64 // of the positive and of the negative elements
		for i, x := range part {
			side := math.Float32bits(x) >> 31
			signs[(from+i)/8] |= byte(side << ((from + i) % 8))
			sums[side] += uint64(math.Abs(float64(x)) * factor)
			counts[side]++
		}
		if e < smallestExponent {
			continue
		}
		for side := range sums {
			if counts[side] > 0 {
				mean := (256*sums[side] + counts[side]/2) / counts[side]
				mean32 := float32(math.Ldexp(float64(float32(mean)), e-158))
				binary.LittleEndian.PutUint32(into[8*block+4*side:], math.Float32bits(mean32))
			}
		}
	}
}

func putFourBit(into []byte, values []float32) {
	pairs := into[ceil(len(values), fourbitBlock):]
	for block := 0; block*fourbitBlock < len(values); block++ {
		from := block * fourbitBlock
		part := values[from:min(from+fourbitBlock, len(values))]
		if exponent(part) < smallestExponent {
			continue
		}
		scale := 0
		for _, x := range part {
			scale = max(scale, min(nearestPower(x), 254))
		}
		into[block] = byte(scale)
		for i, x := range part {
			code := min(nearestPower(x)+7-scale, 7)
			if code < 1 {
				code = 0
				if exponent([]float32{x})+7 >= scale {
					code = 1
				}
			}
			if code > 0 && x < 0 {
				code |= 8
			}
			pairs[(from+i)/2] |= byte(code << (4 * ((from + i) % 2)))
		}
	}
}

// nearestPower is the exponent field of the power of two nearest to a magnitude.
func nearestPower(x float32) int {
	return int((math.Float32bits(x)&0x7FFFFFFF + 1<<22) >> 23)
}
