package fastps

import (
	"encoding/binary"
	"math"
	"unsafe"
)

// littleEndian is set where float32 values in memory have the bytes of the wire.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// bytesOf are the bytes of values, which share their memory.
func bytesOf(values []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(values))), 4*len(values))
}

func putFloats(into []byte, values []float32) {
	if littleEndian {
		copy(into, bytesOf(values))
		return
	}
	for i, x := range values {
		binary.LittleEndian.PutUint32(into[4*i:], math.Float32bits(x))
	}
}

func getFloats(body []byte, values []float32) {
	if littleEndian {
		copy(bytesOf(values), body)
		return
	}
	for i := range values {
		values[i] = math.Float32frombits(binary.LittleEndian.Uint32(body[4*i:]))
	}
}

// floatsOf are the values of a body that nothing else uses: in its memory if possible.
func floatsOf(body []byte) []float32 {
	at := unsafe.Pointer(unsafe.SliceData(body))
	if littleEndian && len(body) > 0 && uintptr(at)%unsafe.Alignof(float32(0)) == 0 {
		return unsafe.Slice((*float32)(at), len(body)/4)
	}
	values := make([]float32, len(body)/4)
	getFloats(body, values)
	return values
}

// allFinite reports whether no value is infinite or NaN, whose product with 0 is NaN.
func allFinite(values []float32) bool {
	var a, b, c, d float32
	for ; len(values) >= 4; values = values[4:] {
		a, b, c, d = a+values[0]*0, b+values[1]*0, c+values[2]*0, d+values[3]*0
	}
	for _, x := range values {
		a += x * 0
	}
	return a+b+c+d == 0
}
