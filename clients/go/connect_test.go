package fastps

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
)

func TestConnectUsesTheDialerAndTheLogger(t *testing.T) {
	dialed := 0
	dialer := grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
		dialed++
		return nil, errors.New("no tunnel")
	})
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	var log bytes.Buffer
	_, err := Connect(ctx, []string{"host-a:7070"},
		Options{DialOptions: []grpc.DialOption{dialer}, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "no tunnel") || dialed == 0 {
		t.Errorf("%v after %d dials", err, dialed)
	}
	if strings.Count(log.String(), "waiting for the server") != 1 || !strings.Contains(log.String(), "no tunnel") {
		t.Errorf("logged %q", log.String())
	}
}
