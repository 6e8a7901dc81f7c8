package fastps

import (
	"cmp"
	"container/list"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	pb "fastps.example/go/fastpsv1"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
)

const (
	protocolMinor = 1
	maxMessage    = 4 << 20
	maxShards     = 4096
	goodbyeTime   = 2 * time.Second
)

// Options are those of a client; the zero value connects in plain text.
type Options struct {
	// Name is shown in the server's logs and statistics. Default: "pid N".
	Name string
	// TLS is the configuration of the connections; nil: plain text. See [TLSFiles].
	TLS *tls.Config
	// TokenFile has the token that servers with --tokens ask for; empty: none. Only its owner may read it. It is read again
	// for each new connection. A token is sent without TLS to this machine only.
	TokenFile string
	// Timeout limits each call whose context has no deadline. Default: 30 s.
	Timeout time.Duration
	// Logged asks for receipts of what is in the server's log on disk. The server needs a data directory.
	Logged bool
	// Copied asks for receipts of what is also in the copy of that log in a bucket, and so in what every later owner of the
	// shard has. The server needs --copy-log.
	Copied bool
	// DialOptions are added to those of each connection, and come last: interceptors, a dialer, other credentials.
	DialOptions []grpc.DialOption
	// Logger is told when connections and sessions begin, and why they end; nil: nobody is.
	Logger *slog.Logger
}

// TLSFiles reads the certificate of the servers' authority, and the client's own certificate with its key, which are
// empty if the server asks for none.
func TLSFiles(authority, certificate, key string) (*tls.Config, error) {
	if isToken(authority) || isToken(certificate) || isToken(key) {
		return nil, newError(Config, "TLSFiles got a token").expected("names of files", "a token")
	}
	pem, err := os.ReadFile(authority)
	if err != nil {
		return nil, newError(Config, "the certificate of the authority cannot be read: %v", err)
	}
	config := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: x509.NewCertPool()}
	if !config.RootCAs.AppendCertsFromPEM(pem) {
		return nil, newError(Config, "no certificate in %s", authority).expected("PEM", "something else")
	}
	if certificate != "" || key != "" {
		own, err := tls.LoadX509KeyPair(certificate, key)
		if err != nil {
			return nil, newError(Config, "the client's certificate cannot be read: %v", err)
		}
		config.Certificates = []tls.Certificate{own}
	}
	return config, nil
}

// Client is a connection to a cluster. It is safe for concurrent use; the pushes of one goroutine to one slice are
// applied in their order.
type Client struct {
	options Options
	secret  []byte
	token   *bearer
	worker  *worker
	links   []*link
	cancel  context.CancelFunc
	done    <-chan struct{}
	tasks   sync.WaitGroup

	sequencing sync.Mutex // holds the order of calls
	sequence   uint64

	mu      sync.Mutex
	end     *Error // of every later call
	tensors map[string]*entry
	epoch   uint64
	losses  []Loss
	places  map[string]*place
}

// Connect connects to all shards of a cluster, of which addresses (host:port or unix:///path) names some. It waits for
// servers that are not there yet, until the context's deadline.
func Connect(ctx context.Context, addresses []string, options Options) (*Client, error) {
	if options.Timeout <= 0 {
		options.Timeout = 30 * time.Second
	}
	if options.Name == "" {
		options.Name = fmt.Sprintf("pid %d", os.Getpid())
	}
	if options.Logger == nil {
		options.Logger = slog.New(slog.DiscardHandler)
	}
	if len(addresses) == 0 {
		return nil, newError(Config, "no address to connect to").expected("host:port or unix:///path", "nothing")
	}
	token, refusal := openBearer(options.TokenFile)
	if refusal != nil {
		return nil, refusal
	}
	ctx, cancel := options.limit(ctx)
	defer cancel()
	running, stop := context.WithCancel(context.Background())
	c := &Client{options: options, secret: make([]byte, 16), token: token, cancel: stop, done: running.Done(),
		worker: newWorker(), tensors: map[string]*entry{}, places: map[string]*place{}}
	if _, err := rand.Read(c.secret); err != nil {
		return nil, newError(Internal, "no random numbers: %v", err)
	}
	if err := c.meetAll(ctx, addresses); err != nil {
		c.end = errClosed()
		c.disconnect()
		return nil, err
	}
	for _, l := range c.links {
		c.tasks.Go(func() { l.drive(running) })
	}
	return c, nil
}

// limit gives a context without a deadline the default one.
func (o Options) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, o.Timeout)
}

func errClosed() *Error { return newError(Closed, "this client is closed") }

// meetAll says hello to the given addresses, then to those that the servers list.
func (c *Client) meetAll(ctx context.Context, addresses []string) error {
	for waiting := slices.Clone(addresses); len(waiting) > 0; {
		var answer *pb.HelloResponse
		for _, address := range waiting {
			if refusal := cmp.Or(checkAddress(address), c.token.check(address, c.options.TLS != nil)); refusal != nil {
				return refusal
			}
		}
		for _, address := range waiting {
			met, err := c.meet(ctx, address)
			if err != nil {
				return err
			}
			answer = met
		}
		waiting = nil
		for shard, l := range c.links {
			if l == nil && slices.Contains(addresses, answer.Cluster[shard]) {
				return newError(Config, "%s answers as another shard than it should", answer.Cluster[shard])
			} else if l == nil {
				waiting = append(waiting, answer.Cluster[shard])
				addresses = append(addresses, answer.Cluster[shard])
			}
		}
	}
	return nil
}

// meet says hello to an address, again while nothing answers there, until the deadline.
func (c *Client) meet(ctx context.Context, address string) (*pb.HelloResponse, error) {
	attempt, stop := context.WithCancel(ctx)
	defer stop()
	watch := &watch{stop: stop}
	conn, err := c.dial(address, watch)
	if err != nil {
		return nil, newError(Config, "%s is no address: %v", address, err)
	}
	l := &link{client: c, shard: -1, address: address, conn: conn, control: pb.NewControlClient(conn),
		data: pb.NewDataClient(conn), wake: make(chan struct{}, 1), unsent: list.New(), sent: map[uint64]*frame{},
		paused: map[*frame]bool{}, known: map[uint64]*known{}, toAsk: map[uint64]bool{}, incarnation: random()}
	l.checksums = c.options.TLS == nil && !isLocal(address)
	told := false
	answer, refusal := again(ctx, address, func(context.Context) (*pb.HelloResponse, *Error) {
		answer, err := hello(attempt, l.control, c, l.incarnation, false, nil)
		if err != nil && (err.Kind == Connection || err.Kind == Internal) {
			err = cmp.Or(watch.refusal.Load(), err)
		}
		if err != nil && err.passes() && !told {
			told = true
			c.options.Logger.Info("waiting for the server", "address", address, "error", err)
		}
		return answer, err
	})
	if refusal == nil {
		refusal = c.add(l, answer)
	}
	if refusal != nil {
		_ = conn.Close()
		refusal.Message = fmt.Sprintf("cannot connect to %s: %s", address, refusal.Message)
		return nil, refusal
	}
	return answer, nil
}

// add takes a shard into the cluster.
func (c *Client) add(l *link, answer *pb.HelloResponse) *Error {
	size, shard := len(answer.Cluster), int(answer.Shard)
	switch {
	case answer.ProtocolMinor < protocolMinor:
		return newError(Config, "the server's protocol is too old").expected(
			fmt.Sprintf("minor version %d", protocolMinor), answer.ProtocolMinor)
	case size == 0 || size > maxShards || shard >= size:
		return newError(Config, "the answer to hello makes no sense").expected(
			fmt.Sprintf("one of 1 to %d shards", maxShards), shardOf(shard, size))
	case c.links == nil:
		c.links = make([]*link, size)
	case len(c.links) != size:
		return newError(Config, "the addresses are of different clusters").expected(
			fmt.Sprintf("%d shards", len(c.links)), fmt.Sprintf("%d shards", size))
	}
	for _, other := range c.links {
		if other != nil && other.cluster != 0 && answer.ClusterId != 0 && other.cluster != answer.ClusterId {
			return newError(Config, "the addresses are of different clusters").expected(
				fmt.Sprintf("cluster %016x", other.cluster), fmt.Sprintf("cluster %016x", answer.ClusterId))
		}
	}
	if c.links[shard] != nil {
		return newError(Config, "%s and %s lead to the same shard", c.links[shard].address, l.address)
	}
	l.shard, l.server, l.cluster, l.term = shard, answer.Server, answer.ClusterId, answer.Term
	l.lease = max(time.Duration(answer.LeaseMs)*time.Millisecond, 300*time.Millisecond)
	l.learn(answer)
	c.links[shard], c.epoch = l, answer.Epoch
	return nil
}

func shardOf(shard, size int) string { return fmt.Sprintf("shard %d of %d", shard, size) }

func isLocal(address string) bool {
	host, _, err := net.SplitHostPort(address)
	ip := net.ParseIP(host)
	return strings.HasPrefix(address, "unix:") || err == nil && (host == "localhost" || ip != nil && ip.IsLoopback())
}

func (c *Client) dial(address string, watch *watch) (*grpc.ClientConn, error) {
	target := "passthrough:///" + address
	watch.TransportCredentials = insecure.NewCredentials()
	if strings.HasPrefix(address, "unix:") {
		target = address
	} else if c.options.TLS != nil {
		watch.TransportCredentials = credentials.NewTLS(c.options.TLS)
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(watch),
		grpc.WithNoProxy(),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: firstPause, Multiplier: 2, Jitter: .3, MaxDelay: longestPause},
			MinConnectTimeout: connectTimeout,
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: connectTimeout}),
		grpc.WithInitialWindowSize(2 << 20), grpc.WithInitialConnWindowSize(4 << 20),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
	}
	if c.token != nil {
		options = append(options, grpc.WithPerRPCCredentials(c.token))
	}
	return grpc.NewClient(target, append(options, c.options.DialOptions...)...)
}

// hello opens or renews a session, without retries.
func hello(ctx context.Context, control pb.ControlClient, c *Client, client uint64, renew bool,
	report *pb.WorkerReport) (*pb.HelloResponse, *Error) {
	request := &pb.HelloRequest{ProtocolMinor: protocolMinor, Client: client, Name: c.options.Name, Renew: renew,
		Secret: c.secret, Ack: pb.Ack_ACK_APPLIED, Report: report}
	switch {
	case c.options.Copied:
		request.Ack = pb.Ack_ACK_COPIED
	case c.options.Logged:
		request.Ack = pb.Ack_ACK_LOGGED
	}
	answer, err := control.Hello(ctx, request)
	if err != nil {
		return nil, fromStatus(err)
	}
	if c.options.Logged && !slices.Contains(answer.Capabilities, "log") {
		err := newError(Precondition, "the server keeps no log").expected("a server with --data-dir", "Options.Logged")
		return nil, err.of("", int(answer.Shard))
	}
	if c.options.Copied && !slices.Contains(answer.Capabilities, "copied") {
		err := newError(Precondition, "the server does not copy its log").expected("a server with --copy-log", "Options.Copied")
		return nil, err.of("", int(answer.Shard))
	}
	return answer, nil
}

// again makes a unary call, again while it may pass, until the deadline.
func again[T any](ctx context.Context, address string, call func(context.Context) (T, *Error)) (T, *Error) {
	var last *Error
	for pause := firstPause; ; pause = min(2*pause, longestPause/2) {
		answer, err := call(ctx)
		if err == nil {
			return answer, nil
		}
		if ctx.Err() != nil {
			return answer, ended(ctx, address, last)
		}
		if !err.passes() {
			return answer, err
		}
		last = err
		if wait(ctx, max(jitter(pause), err.RetryAfter)); ctx.Err() != nil {
			return answer, ended(ctx, address, last)
		}
	}
}

// unary makes a call to a shard, under its present incarnation.
func unary[Req, Res any](ctx context.Context, l *link, method func(context.Context, *Req, ...grpc.CallOption) (*Res, error),
	request func(client uint64) *Req) (*Res, *Error) {
	return again(ctx, l.address, func(ctx context.Context) (*Res, *Error) {
		l.mu.Lock()
		client := l.incarnation
		l.mu.Unlock()
		shown := l.client.token.present()
		answer, err := method(l.metadata(ctx), request(client))
		if err == nil {
			return answer, nil
		}
		if err := l.client.check(); err != nil {
			return nil, err
		}
		refusal := fromStatus(err).of("", l.shard)
		if refusal.Kind == Unauthenticated && l.client.token.hasNewerThan(shown) {
			refusal.RetryAfter = 0
		}
		if refusal.Kind == Lease {
			l.mu.Lock()
			l.loseLease(client)
			l.mu.Unlock()
		}
		return nil, refusal
	})
}

func random() uint64 {
	var bytes [8]byte
	_, _ = rand.Read(bytes[:]) // never fails
	return binary.LittleEndian.Uint64(bytes[:]) | 1
}

// begin checks that the client is usable and gives the call a deadline.
func (c *Client) begin(ctx context.Context) (context.Context, context.CancelFunc, error) {
	if err := c.check(); err != nil {
		return nil, nil, err
	}
	c.mu.Lock()
	losses := c.losses
	c.losses = nil
	c.mu.Unlock()
	if losses != nil {
		err := newError(VersionsLost, "a server restarted without changes that it had acknowledged: %v. This is reported once; "+
			"training can continue from here", losses)
		err.Lost = losses
		return nil, nil, err
	}
	ctx, cancel := c.options.limit(ctx)
	begun := time.Now()
	return ctx, func() {
		cancel()
		c.worker.wait(time.Since(begun))
	}, nil
}

func (c *Client) check() *Error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.end
}

func (c *Client) ended() *Error {
	if err := c.check(); err != nil {
		return err
	}
	return errClosed()
}

// fence ends the client because its tensors are gone.
func (c *Client) fence(why *Error) *Error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.end == nil {
		c.end = why
		c.cancel()
	}
	return c.end
}

func (c *Client) noteLosses(losses []loss) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, lost := range losses {
		for _, e := range c.tensors {
			if slices.Contains(e.ids, lost.slice) {
				lost.Tensor = e.spec.Name
			}
		}
		c.losses = append(c.losses, lost.Loss)
	}
}

// Close ends the sessions, every call that waits, and every goroutine of the client. It may be repeated.
func (c *Client) Close() error {
	c.mu.Lock()
	first := c.end == nil
	if first {
		c.end = errClosed()
	}
	c.mu.Unlock()
	if first {
		c.goodbye()
	}
	c.cancel()
	c.tasks.Wait()
	c.disconnect()
	return nil
}

// goodbye ends the sessions at the servers that can be reached, unless frames on their way need them.
func (c *Client) goodbye() {
	ctx, cancel := context.WithTimeout(context.Background(), goodbyeTime)
	defer cancel()
	var tasks sync.WaitGroup
	for _, l := range c.links {
		l.mu.Lock()
		quiet := l.end != nil && len(l.openFrames()) == 0
		request := &pb.HelloRequest{ProtocolMinor: protocolMinor, Client: l.incarnation, Name: c.options.Name,
			Renew: true, Close: true, Secret: c.secret}
		l.mu.Unlock()
		if quiet {
			// A server that does not answer finds out when the lease ends.
			tasks.Go(func() { _, _ = l.control.Hello(l.metadata(ctx), request) })
		}
	}
	tasks.Wait()
}

func (c *Client) disconnect() {
	for _, l := range c.links {
		if l != nil {
			_ = l.conn.Close()
		}
	}
}
