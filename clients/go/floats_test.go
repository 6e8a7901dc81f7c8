package fastps

import (
	"math"
	"slices"
	"testing"
)

func TestValuesInMemoryAreThoseOfTheWire(t *testing.T) {
	values := []float32{0, 1.5, -2, math.MaxFloat32, math.SmallestNonzeroFloat32}
	body := make([]byte, 1+4*len(values))
	putFloats(body[1:], values)
	if !slices.Equal(body[1:9], []byte{0, 0, 0, 0, 0, 0, 0xC0, 0x3F}) {
		t.Fatalf("the bytes are %x", body[1:9])
	}
	got := make([]float32, len(values))
	getFloats(body[1:], got)
	for _, found := range [][]float32{got, floatsOf(body[1:]), floatsOf(slices.Clone(body[1:]))} {
		if !slices.Equal(found, values) {
			t.Fatalf("%v, expected %v", found, values)
		}
	}
	if found := floatsOf(nil); found == nil || len(found) != 0 {
		t.Fatalf("the values of an empty tensor are %v", found)
	}
}

func TestOneValueThatIsNotFiniteIsFound(t *testing.T) {
	for n := range 12 {
		values := slices.Repeat([]float32{-math.MaxFloat32, math.MaxFloat32, 0}, 4)[:n]
		if !allFinite(values) {
			t.Fatalf("%v are finite", values)
		}
		for at := range n {
			for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
				changed := slices.Clone(values)
				changed[at] = float32(bad)
				if allFinite(changed) {
					t.Fatalf("%v has a value that is not finite", changed)
				}
			}
		}
	}
}
