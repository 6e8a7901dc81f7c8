package fastps

import (
	"encoding/hex"
	"encoding/json"
	"testing"

	pb "fastps.example/go/fastpsv1"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

func TestGoldenFramesHaveTheirFields(t *testing.T) {
	var frames []struct {
		Name   string
		Hex    hexBytes
		Fields json.RawMessage
	}
	readVectors(t, "frames.json", &frames)
	for _, golden := range frames {
		var read, want pb.Frame
		if err := proto.Unmarshal(golden.Hex, &read); err != nil {
			t.Fatal(golden.Name, err)
		}
		if err := protojson.Unmarshal(golden.Fields, &want); err != nil {
			t.Fatal(golden.Name, err)
		}
		if !proto.Equal(&read, &want) {
			t.Errorf("%s: read %v, not %v", golden.Name, &read, &want)
		}
		written, err := proto.MarshalOptions{Deterministic: true}.Marshal(&want)
		if err != nil || hex.EncodeToString(written) != hex.EncodeToString(golden.Hex) {
			t.Errorf("%s: wrote %x, not %x (%v)", golden.Name, written, golden.Hex, err)
		}
	}
	if len(frames) < 20 {
		t.Errorf("only %d frames", len(frames))
	}
}
