// Command speed compares steps of the client with a plain gRPC stream that carries the same messages to a server which
// only returns them. benchmarks/go_client.py runs it.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"os/exec"
	"slices"
	"time"

	fastps "fastps.example/go"
	pb "fastps.example/go/fastpsv1"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

const rounds = 5

// echo returns every frame.
type echo struct{ pb.UnimplementedDataServer }

func (echo) Exchange(stream pb.Data_ExchangeServer) error {
	for {
		frame, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err == nil {
			err = stream.Send(frame)
		}
		if err != nil {
			return err
		}
	}
}

// serve prints its address, and ends with its standard input.
func serve() error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := grpc.NewServer(grpc.InitialWindowSize(2<<20), grpc.InitialConnWindowSize(4<<20))
	pb.RegisterDataServer(server, echo{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		server.Stop()
	}()
	fmt.Println(listener.Addr())
	return server.Serve(listener)
}

// startEcho starts this program as the other server.
func startEcho() (address string, end func(), err error) {
	command := exec.Command(os.Args[0], "-echo")
	input, err := command.StdinPipe()
	if err != nil {
		return "", nil, err
	}
	output, err := command.StdoutPipe()
	if err != nil {
		return "", nil, err
	}
	if err := command.Start(); err != nil {
		return "", nil, err
	}
	if _, err := fmt.Fscan(output, &address); err != nil {
		return "", nil, err
	}
	return address, func() { _ = input.Close(); _ = command.Wait() }, nil
}

// rate is the number of steps per second.
func rate(seconds float64, step func() error) (float64, error) {
	begun, steps := time.Now(), 0
	for time.Since(begun).Seconds() < seconds {
		if err := step(); err != nil {
			return 0, err
		}
		steps++
	}
	return float64(steps) / time.Since(begun).Seconds(), nil
}

func median(rates []float64) float64 {
	slices.Sort(rates)
	return rates[len(rates)/2]
}

// compare takes steps with both servers in turns.
func compare(ctx context.Context, client *fastps.Client, stream pb.Data_ExchangeClient, floats int, seconds float64) (own, plain float64, err error) {
	name := fmt.Sprintf("speed %d", floats)
	sgd := fastps.Optimizer{Name: "sgd", Settings: map[string]float64{"lr": 1e-6}}
	values := make([]float32, floats)
	if _, err := client.Register(ctx, fastps.Tensor{Name: name, Shape: []int{floats}, Optimizer: sgd}, values); err != nil {
		return 0, 0, err
	}
	push := []fastps.Gradient{{Tensor: name, Values: values}}
	frame := &pb.Frame{Header: &pb.Header{Kind: pb.Kind_KIND_GRADIENT, Tag: 1, Slice: 1, Count: uint64(floats), Client: 1,
		Sequence: 1}, Payload: make([]byte, 4*floats)}
	var owns, plains []float64
	for range rounds {
		one, err := rate(seconds, func() error {
			_, _, err := client.PushPull(ctx, push, fastps.PushOptions{})
			return err
		})
		if err != nil {
			return 0, 0, err
		}
		owns = append(owns, one)
		one, err = rate(seconds, func() error {
			if err := stream.Send(frame); err != nil {
				return err
			}
			_, err := stream.Recv()
			return err
		})
		if err != nil {
			return 0, 0, err
		}
		plains = append(plains, one)
	}
	return median(owns), median(plains), nil
}

func run(server string, seconds float64) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	address, end, err := startEcho()
	if err != nil {
		return err
	}
	defer end()
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithInitialWindowSize(2<<20), grpc.WithInitialConnWindowSize(4<<20))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	stream, err := pb.NewDataClient(conn).Exchange(ctx)
	if err != nil {
		return err
	}
	client, err := fastps.Connect(ctx, []string{server}, fastps.Options{})
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	for _, floats := range []int{1024, 63 * 4096} {
		own, plain, err := compare(ctx, client, stream, floats, seconds)
		if err != nil {
			return err
		}
		line := map[string]float64{"bytes": float64(4 * floats), "fastps": own, "echo": plain}
		if err := json.NewEncoder(os.Stdout).Encode(line); err != nil {
			return err
		}
	}
	return nil
}

func main() {
	asEcho := flag.Bool("echo", false, "be the other server")
	server := flag.String("server", "", "address of a fastps server")
	seconds := flag.Float64("seconds", 1, "seconds per round")
	flag.Parse()
	var err error
	if *asEcho {
		err = serve()
	} else {
		err = run(*server, *seconds)
	}
	if err != nil {
		log.Fatal(err)
	}
}
