// Command driver runs the commands that it reads as JSON lines, and answers each with one line. tests/clients has the
// scenarios; a client in another language joins them with a program that reads the same commands.
package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"time"

	fastps "fastps.example/go"

	"google.golang.org/grpc/status"
)

// floats are float32 values, little-endian, in base64.
type floats []float32

func (f floats) MarshalJSON() ([]byte, error) {
	raw := make([]byte, 0, 4*len(f))
	for _, x := range f {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(x))
	}
	return json.Marshal(raw)
}

func (f *floats) UnmarshalJSON(text []byte) error {
	var encoded string
	if err := json.Unmarshal(text, &encoded); err != nil {
		return err
	}
	raw, err := base64.StdEncoding.DecodeString(encoded)
	*f = make(floats, len(raw)/4)
	for i := range *f {
		(*f)[i] = math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:]))
	}
	return err
}

type gradient struct {
	Tensor string `json:"tensor"`
	Values floats `json:"values"`
	Rows   []int  `json:"rows"`
}

// command has the fields of all commands.
type command struct {
	Op        string   `json:"op"`
	As        string   `json:"as"` // which client
	Addresses []string `json:"addresses"`
	TimeoutMs int      `json:"timeout_ms"`
	Name      string   `json:"name"`
	Logged    bool     `json:"logged"`
	Token     string   `json:"token"` // file
	TLS       *struct {
		CA   string `json:"ca"`
		Cert string `json:"cert"`
		Key  string `json:"key"`
		Name string `json:"name"`
	} `json:"tls"`
	Tensor struct {
		Name      string             `json:"name"`
		Shape     []int              `json:"shape"`
		Optimizer string             `json:"optimizer"`
		Settings  map[string]float64 `json:"settings"`
		Group     string             `json:"group"`
		BFloat16  bool               `json:"bfloat16"`
		Hogwild   bool               `json:"hogwild"`
	} `json:"tensor"`
	Values    floats     `json:"values"`
	Gradients []gradient `json:"gradients"`
	Codec     string     `json:"codec"`
	Feedback  string     `json:"feedback"` // which error feedback
	BasedOn   string     `json:"based_on"` // which versions
	Keep      string     `json:"keep"`     // where versions are kept
	LR        *float64   `json:"lr"`
	Note      string     `json:"note"`
	Mark      string     `json:"mark"`
	Loss      *float64   `json:"loss"`
	Scale     *float32   `json:"scale"`
	Tensors   []string   `json:"tensors"`
	Rows      []int      `json:"rows"`
	Group     string     `json:"group"`
	Mode      string     `json:"mode"`
	Workers   int        `json:"workers"`
	Staleness uint64     `json:"staleness"`
	Rank      *uint32    `json:"rank"`
	Times     int        `json:"times"`
}

// spec is the tensor of a registration, under this name.
func (c command) spec(name string) fastps.Tensor {
	t := c.Tensor
	return fastps.Tensor{Name: name, Shape: t.Shape, Group: t.Group, BFloat16: t.BFloat16, Hogwild: t.Hogwild,
		Optimizer: fastps.Optimizer{Name: t.Optimizer, Settings: t.Settings}}
}

type answer map[string]any

// driver is the state between commands.
type driver struct {
	clients   map[string]*fastps.Client
	feedbacks map[string]*fastps.Feedback
	versions  map[string]*fastps.Versions
	doubts    []*fastps.Doubt
}

func main() {
	d := driver{map[string]*fastps.Client{}, map[string]*fastps.Feedback{}, map[string]*fastps.Versions{}, nil}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 64<<20)
	out := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var c command
		result, err := answer(nil), json.Unmarshal(lines.Bytes(), &c)
		begun := time.Now()
		if err == nil {
			result, err = d.run(c)
		}
		if result == nil {
			result = answer{}
		}
		if err != nil {
			result["error"] = d.describe(err)
		}
		result["seconds"] = time.Since(begun).Seconds()
		if err := out.Encode(result); err != nil {
			return
		}
	}
	for _, client := range d.clients {
		_ = client.Close()
	}
}

// describe gives the fields of an error.
func (d *driver) describe(err error) answer {
	fields := answer{"message": err.Error(), "deadline": errors.Is(err, context.DeadlineExceeded),
		"code": status.Code(err).String()}
	var e *fastps.Error
	if errors.As(err, &e) {
		fields["kind"], fields["text"], fields["tensor"], fields["shard"] = e.Kind, e.Message, e.Tensor, e.Shard
		fields["expected"], fields["got"], fields["retry_after_ms"] = e.Expected, e.Got, e.RetryAfter.Milliseconds()
		fields["lost"] = e.Lost
	}
	var partial *fastps.PartialPush
	if errors.As(err, &partial) {
		d.doubts = append(d.doubts, partial.InDoubt...)
		fields["in_doubt"], fields["refused"], fields["applied"] = len(partial.InDoubt), len(partial.Refused), partial.Receipts
	}
	return fields
}

func (d *driver) run(c command) (answer, error) {
	ctx := context.Background()
	if c.TimeoutMs > 0 {
		limited, cancel := context.WithTimeout(ctx, time.Duration(c.TimeoutMs)*time.Millisecond)
		defer cancel()
		ctx = limited
	}
	client := d.clients[c.As]
	switch c.Op {
	case "connect":
		return d.connect(ctx, c)
	case "residuals":
		saved, err := d.feedback(c.Feedback).Residuals(ctx)
		return answer{"values": encoded(saved)}, err
	case "doubts":
		return d.settle(ctx)
	case "resources":
		runtime.GC()
		files, err := os.ReadDir("/proc/self/fd")
		return answer{"goroutines": runtime.NumGoroutine(), "files": len(files)}, err
	case "cycle":
		return nil, cycle(ctx, c)
	}
	if client == nil {
		return nil, fmt.Errorf("no client %q for %q", c.As, c.Op)
	}
	switch c.Op {
	case "close":
		return nil, client.Close()
	case "register":
		tensor := c.spec(c.Tensor.Name)
		created, err := client.Register(ctx, tensor, c.Values)
		return answer{"created": created}, err
	case "register_all":
		var all []fastps.Registration
		for _, name := range c.Tensors {
			all = append(all, fastps.Registration{Tensor: c.spec(name), Values: c.Values})
		}
		return nil, client.RegisterAll(ctx, all)
	case "push":
		options, err := d.options(c)
		if err != nil {
			return nil, err
		}
		receipts, err := client.Push(ctx, c.gradients(), options)
		return answer{"receipts": receipts}, err
	case "push_pull":
		options, err := d.options(c)
		if err != nil {
			return nil, err
		}
		pulled, receipts, err := client.PushPull(ctx, c.gradients(), options)
		result := d.pulled(c, pulled, err)
		result["receipts"] = receipts
		return result, err
	case "pull":
		pulled, err := client.Pull(ctx, c.Tensors...)
		return d.pulled(c, pulled, err), err
	case "pull_rows":
		values, versions, err := client.PullRows(ctx, c.Tensors[0], c.Rows)
		return d.pulled(c, &fastps.Pulled{Values: map[string][]float32{c.Tensors[0]: values}, Versions: versions}, err), err
	case "versions":
		versions, err := client.Versions(ctx, c.Tensors...)
		return d.pulled(c, &fastps.Pulled{Versions: versions}, err), err
	case "names":
		names, err := client.Names(ctx)
		return answer{"names": names}, err
	case "mark":
		return nil, client.Mark(ctx, c.Mark)
	case "unregister":
		return nil, client.Unregister(ctx, c.Tensors[0])
	case "stats":
		stats, err := client.Stats(ctx)
		return answer{"shards": stats}, err
	case "join":
		modes := map[string]fastps.Mode{"free": fastps.Free{}, "bounded": fastps.Bounded{Staleness: c.Staleness},
			"sync": fastps.Sync{Workers: c.Workers}}
		return nil, client.Join(ctx, fastps.Place{Group: c.Group, Mode: modes[c.Mode], Rank: c.Rank, Name: c.Name})
	case "advance":
		return nil, client.Advance(ctx, c.Group, 1)
	case "leave":
		return nil, client.Leave(ctx, c.Group)
	}
	return nil, fmt.Errorf("no command %q", c.Op)
}

func (d *driver) connect(ctx context.Context, c command) (answer, error) {
	options, err := c.connectOptions()
	if err != nil {
		return nil, err
	}
	client, err := fastps.Connect(ctx, c.Addresses, options)
	if err == nil {
		d.clients[c.As] = client
	}
	return nil, err
}

func (c command) connectOptions() (options fastps.Options, err error) {
	options = fastps.Options{Name: c.Name, Logged: c.Logged, TokenFile: c.Token}
	if c.TLS != nil {
		options.TLS, err = fastps.TLSFiles(c.TLS.CA, c.TLS.Cert, c.TLS.Key)
		if err == nil {
			options.TLS.ServerName = c.TLS.Name
		}
	}
	return options, err
}

// cycle opens and closes connections that pull.
func cycle(ctx context.Context, c command) error {
	options, err := c.connectOptions()
	if err != nil {
		return err
	}
	for range c.Times {
		client, err := fastps.Connect(ctx, c.Addresses, options)
		if err != nil {
			return err
		}
		_, err = client.Pull(ctx, c.Tensors...)
		if err := errors.Join(err, client.Close()); err != nil {
			return err
		}
	}
	return nil
}

func (c command) gradients() []fastps.Gradient {
	gradients := make([]fastps.Gradient, len(c.Gradients))
	for i, g := range c.Gradients {
		gradients[i] = fastps.Gradient{Tensor: g.Tensor, Values: g.Values, Rows: g.Rows}
	}
	return gradients
}

func (d *driver) feedback(name string) *fastps.Feedback {
	if name == "" {
		return nil
	}
	if d.feedbacks[name] == nil {
		d.feedbacks[name] = fastps.NewFeedback(nil)
	}
	return d.feedbacks[name]
}

func (d *driver) options(c command) (fastps.PushOptions, error) {
	codecs := map[string]fastps.Codec{"": fastps.Float32, "float32": fastps.Float32, "bfloat16": fastps.BFloat16,
		"int8": fastps.Int8, "onebit": fastps.OneBit, "fourbit": fastps.FourBit, "stochastic": fastps.StochasticInt8(7)}
	codec, ok := codecs[c.Codec]
	if !ok {
		return fastps.PushOptions{}, fmt.Errorf("no codec %q", c.Codec)
	}
	return fastps.PushOptions{Codec: codec, Feedback: d.feedback(c.Feedback), BasedOn: d.versions[c.BasedOn], LR: c.LR,
		Scale: c.Scale, Loss: c.Loss, Note: c.Note}, nil
}

func (d *driver) pulled(c command, pulled *fastps.Pulled, err error) answer {
	if err != nil {
		return answer{}
	}
	d.versions[c.Keep] = pulled.Versions
	versions := map[string][]uint64{}
	for _, name := range c.Tensors {
		versions[name] = pulled.Versions.Of(name)
	}
	for _, g := range c.Gradients {
		versions[g.Tensor] = pulled.Versions.Of(g.Tensor)
	}
	return answer{"values": encoded(pulled.Values), "versions": versions}
}

func encoded(values map[string][]float32) map[string]floats {
	all := map[string]floats{}
	for name, one := range values {
		all[name] = one
	}
	return all
}

// settle waits for the fates of all pushes in doubt.
func (d *driver) settle(ctx context.Context) (answer, error) {
	names := map[fastps.FateKind]string{fastps.Unknown: "unknown", fastps.Applied: "applied", fastps.NotApplied: "not applied"}
	fates := []answer{}
	for _, doubt := range d.doubts {
		fate, err := doubt.Wait(ctx)
		if err != nil {
			return nil, err
		}
		fates = append(fates, answer{"tensor": doubt.Tensor, "fate": names[fate.Kind], "version": fate.Version})
	}
	d.doubts = nil
	return answer{"fates": fates}, nil
}
