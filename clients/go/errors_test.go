package fastps

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	pb "fastps.example/go/fastpsv1"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	rpc "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// replay ends every Hello with the golden status of the kind in its metadata.
type replay struct {
	pb.UnimplementedControlServer
	statuses map[string]*rpc.Status
}

func (r replay) Hello(ctx context.Context, _ *pb.HelloRequest) (*pb.HelloResponse, error) {
	known, _ := metadata.FromIncomingContext(ctx)
	return nil, status.FromProto(r.statuses[known.Get("kind")[0]]).Err()
}

func TestEveryRefusalIsRead(t *testing.T) {
	var cases []struct {
		Refusal struct {
			Kind, Message, Tensor, Expected, Got string
			Shard                                *int
			RetryAfterMs                         *int64 `json:"retry_after_ms"`
		}
		Code, Message string
		Details       hexBytes
	}
	readVectors(t, "statuses.json", &cases)
	statuses := map[string]*rpc.Status{}
	for _, c := range cases {
		golden := &rpc.Status{}
		if err := proto.Unmarshal(c.Details, golden); err != nil {
			t.Fatal(err)
		}
		statuses[c.Refusal.Kind] = golden
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	pb.RegisterControlServer(server, replay{statuses: statuses})
	go func() { _ = server.Serve(listener) }()
	defer server.Stop()
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for _, c := range cases {
		_, err := pb.NewControlClient(conn).Hello(metadata.AppendToOutgoingContext(ctx, "kind", c.Refusal.Kind), &pb.HelloRequest{})
		read, ok := status.FromError(err)
		var code codes.Code
		if err := code.UnmarshalJSON([]byte(`"` + c.Code + `"`)); err != nil {
			t.Fatal(err)
		}
		if !ok || read.Message() != c.Message || read.Code() != code {
			t.Errorf("%s: the status is %v", c.Refusal.Kind, err)
		}
		if info, ok := read.Details()[1].(*errdetails.ErrorInfo); !ok || info.Domain != "fastps" {
			t.Errorf("%s: no error info in %v", c.Refusal.Kind, read.Details())
		}
		e := fromStatus(err)
		want := newError(Kind(c.Refusal.Kind), "%s", c.Refusal.Message)
		want.Tensor, want.Expected, want.Got = c.Refusal.Tensor, c.Refusal.Expected, c.Refusal.Got
		if c.Refusal.Shard != nil {
			want.Shard = *c.Refusal.Shard
		}
		if c.Refusal.RetryAfterMs != nil {
			want.RetryAfter = time.Duration(*c.Refusal.RetryAfterMs) * time.Millisecond
		}
		if e.Error() != want.Error() || e.Kind != want.Kind || e.RetryAfter != want.RetryAfter {
			t.Errorf("read %+v, not %+v", e, want)
		}
		if status.Code(e) != code {
			t.Errorf("the code of %v is %v, not %v", e, status.Code(e), code)
		}
		if e.Error() != c.Message && e.RetryAfter < 0 {
			t.Errorf("the text is %q, not %q", e, c.Message)
		}
	}
}

func TestErrorsAreFoundByTheirTypes(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	var err error = &PartialPush{Reason: ended(ctx, "a:1", nil)}
	var e *Error
	if !errors.As(err, &e) || e.Kind != Deadline || !errors.Is(err, context.Canceled) {
		t.Errorf("%v is neither", err)
	}
	for _, c := range []struct {
		err  error
		code codes.Code
	}{
		{err, codes.Canceled},
		{errClosed(), codes.Canceled},
		{newError(Connection, "gone"), codes.Unavailable},
		{newError(VersionsLost, "lost"), codes.DataLoss},
	} {
		if read, ok := status.FromError(c.err); !ok || read.Code() != c.code || read.Message() != c.err.Error() {
			t.Errorf("the status of %v is %v", c.err, read)
		}
	}
	if fromRefusal(nil).Kind != Internal || fromRefusal(&pb.Refusal{Kind: "tomorrow"}).Kind != Internal {
		t.Error("an unknown kind is internal")
	}
}
