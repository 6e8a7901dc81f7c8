package fastps

import (
	"encoding/binary"
	"slices"
	"testing"

	pb "fastps.example/go/fastpsv1"
)

func TestRowsAreSplitByTheBordersOfSlices(t *testing.T) {
	e := &entry{spec: &pb.TensorSpec{Name: "w", Shape: []uint64{600, 1000}}, n: 600_000, ids: []uint64{7, 8, 9},
		shards: []int{0, 1, 0}}
	distinct, parts := planRows(e, []int{599, 258, 3, 258}, true)
	if !slices.Equal(distinct, []int{3, 258, 599}) {
		t.Fatalf("the rows are %v", distinct)
	}
	type share struct {
		index, first, count int
		rows                []uint32
	}
	// Slice 1 begins with element 48 of row 258.
	want := []share{{0, 0, 1048, []uint32{3, 258}}, {1, 1048, 952, []uint32{0}}, {2, 2000, 1000, []uint32{83}}}
	for i, p := range parts {
		got := share{index: p.index, first: p.first, count: p.count}
		for at := 0; at < len(p.numbers); at += 4 {
			got.rows = append(got.rows, binary.LittleEndian.Uint32(p.numbers[at:]))
		}
		if got.index != want[i].index || got.first != want[i].first || got.count != want[i].count || !slices.Equal(got.rows, want[i].rows) {
			t.Errorf("part %d is %+v, not %+v", i, got, want[i])
		}
	}
	if len(parts) != len(want) {
		t.Errorf("there are %d parts", len(parts))
	}
}
