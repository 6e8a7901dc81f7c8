package fastps

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"os"
	"strconv"
	"testing"
)

// hexBytes are bytes in hex.
type hexBytes []byte

func (h *hexBytes) UnmarshalJSON(text []byte) error {
	var digits string
	if err := json.Unmarshal(text, &digits); err != nil {
		return err
	}
	raw, err := hex.DecodeString(digits)
	*h = raw
	return err
}

func (h hexBytes) floats() []float32 {
	values := make([]float32, len(h)/4)
	getFloats(h, values)
	return values
}

func readVectors(t *testing.T, name string, into any) {
	t.Helper()
	text, err := os.ReadFile("../../tests/vectors/" + name)
	if err != nil {
		t.Skipf("the golden bytes are beside the whole project: %v", err)
	}
	if err := json.Unmarshal(text, into); err != nil {
		t.Fatal(err)
	}
}

func hexNumber(t *testing.T, digits string) uint64 {
	t.Helper()
	if digits == "" {
		return 0
	}
	number, err := strconv.ParseUint(digits, 0, 64)
	if err != nil {
		t.Fatal(err)
	}
	return number
}

func TestCodecsHaveTheGoldenBytes(t *testing.T) {
	var vectors struct {
		Cases []struct {
			Codec, Name    string
			Input, Body    hexBytes
			Decoded        hexBytes
			Residual       hexBytes
			ResidualAfter  hexBytes `json:"residual_after"`
			Seed, Sequence string
			FirstElement   string `json:"first_element"`
		}
	}
	readVectors(t, "codecs.json", &vectors)
	seen := map[string]int{}
	for _, c := range vectors.Cases {
		codec := map[string]Codec{"float32": Float32, "bfloat16": BFloat16, "int8": Int8, "onebit": OneBit, "fourbit": FourBit}[c.Codec]
		if c.Seed != "" {
			codec = StochasticInt8(hexNumber(t, c.Seed))
			seen["stochastic"]++
		}
		seen[c.Codec]++
		values := c.Input.floats()
		first, sequence := hexNumber(t, c.FirstElement), hexNumber(t, c.Sequence)
		var body []byte
		if c.Residual == nil {
			body = codec.append(nil, values, first, sequence)
		} else {
			feedback := NewFeedback(map[string][]float32{"w": c.Residual.floats()})
			encoded, _, err := feedback.encode(codec, values, "w", 0, len(values), sequence)
			if err != nil {
				t.Fatal(err)
			}
			body = encoded
			after := make([]byte, 4*len(values))
			putFloats(after, feedback.residuals["w"])
			if !bytes.Equal(after, c.ResidualAfter) {
				t.Errorf("%s, %s: the residual is %x, not %x", c.Codec, c.Name, after, c.ResidualAfter)
			}
			seen["residual"]++
		}
		if !bytes.Equal(body, c.Body) {
			t.Errorf("%s, %s: the body is %x, not %x", c.Codec, c.Name, body, c.Body)
		}
		decoded := make([]float32, len(values))
		codec.decode(c.Body, decoded)
		raw := make([]byte, 4*len(values))
		putFloats(raw, decoded)
		if !bytes.Equal(raw, c.Decoded) {
			t.Errorf("%s, %s: decoded %x, not %x", c.Codec, c.Name, raw, c.Decoded)
		}
	}
	for _, kind := range []string{"float32", "bfloat16", "int8", "onebit", "fourbit", "stochastic", "residual"} {
		if seen[kind] == 0 {
			t.Errorf("no vector of %s was read", kind)
		}
	}
}

func TestContentThatWasNotAppliedReturns(t *testing.T) {
	values := []float32{1, -2, 3.5, 1e-3}
	feedback := NewFeedback(nil)
	for _, c := range []struct {
		kind Kind
		want []float32
	}{{Fenced, values}, {NonFinite, make([]float32, 4)}} {
		_, residue, err := feedback.encode(Int8, values, "w", 0, 4, 1)
		if err != nil {
			t.Fatal(err)
		}
		residue.refused(c.kind)
		for i, x := range feedback.residuals["w"] {
			if x != c.want[i] {
				t.Errorf("%s: the residual is %v, not %v", c.kind, feedback.residuals["w"], c.want)
				break
			}
		}
		clear(feedback.residuals)
	}
}
