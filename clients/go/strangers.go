package fastps

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unicode"

	"google.golang.org/grpc/credentials"
)

// checkAddress fails if no server can have the address.
func checkAddress(address string) *Error {
	if isToken(address) {
		return newError(Config, "invalid address").expected("host:port or unix:///path", "a token")
	}
	if strings.HasPrefix(address, "unix:") {
		path, ok := strings.CutPrefix(address, "unix://")
		if ok && filepath.IsAbs(path) {
			return nil
		}
		return newError(Config, "not the address of a Unix socket").expected("unix:///path", address)
	}
	host, text, err := net.SplitHostPort(address)
	port, noPort := strconv.ParseUint(text, 10, 16)
	if err != nil || noPort != nil || port == 0 || host == "" || strings.ContainsAny(host, "/@ ") {
		return newError(Config, "invalid address").expected("host:port or unix:///path", strconv.Quote(address))
	}
	return nil
}

// openingBytes is how much of what a connection reads first is kept.
const openingBytes = 60

// watch is the security of a link's connections. It keeps the first reason that no retry changes, and ends the attempt
// to connect, in which gRPC would try again.
type watch struct {
	credentials.TransportCredentials
	refusal atomic.Pointer[Error]
	stop    context.CancelFunc
}

func (w *watch) refuse(why *Error) {
	if why != nil && w.refusal.CompareAndSwap(nil, why) {
		w.stop()
	}
}

func (w *watch) Clone() credentials.TransportCredentials { return w }

func (w *watch) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := w.TransportCredentials.ClientHandshake(ctx, authority, raw)
	w.refuse(refusedByTLS(err))
	if err != nil {
		return nil, nil, err
	}
	return &watched{Conn: conn, watch: w}, info, nil
}

// watched looks at the first bytes of a connection.
type watched struct {
	net.Conn
	watch   *watch
	opening []byte
}

func (c *watched) Read(into []byte) (int, error) {
	n, err := c.Conn.Read(into)
	if missing := openingBytes - len(c.opening); missing > 0 {
		c.opening = append(c.opening, into[:min(n, missing)]...)
		c.watch.refuse(cmp.Or(stranger(c.opening), refusedByTLS(err)))
	}
	return n, err
}

// stranger is the error of an opening that is not a server's; nil: it may be.
func stranger(opening []byte) *Error {
	if wantsTLS(opening) {
		return newError(Denied, "this port speaks TLS").expected(
			"Options.TLS, with the CA that signed the server's certificate", "none")
	}
	line := string(opening)
	if end := strings.IndexAny(line, "\r\n"); end >= 0 {
		line = line[:end]
	}
	if line == "" || strings.ContainsFunc(line, func(r rune) bool { return r < ' ' || r > '~' }) {
		return nil
	}
	got := fmt.Sprintf("another program that answers %q", line)
	switch words := strings.Split(line, " "); {
	case len(words) > 1 && strings.HasPrefix(line, "HTTP/"):
		got = fmt.Sprintf("a web server that answers %s %s", words[0], words[1])
	case line[0] == '<': // a page, without a status
		got = fmt.Sprintf("a web server that answers %s", line)
	}
	return newError(Config, "no server of fastps listens there; check host and port").expected("a server of fastps", got)
}

// wantsTLS reports whether an opening is a TLS record (an alert, a handshake), or how servers refuse plain text: empty
// SETTINGS, and a GOAWAY with INADEQUATE_SECURITY.
func wantsTLS(opening []byte) bool {
	if len(opening) > 1 && (opening[0] == 0x15 || opening[0] == 0x16) && opening[1] == 3 {
		return true
	}
	frame, ok := bytes.CutPrefix(opening, []byte{0, 0, 0, 4, 0, 0, 0, 0, 0})
	return ok && len(frame) >= 17 && frame[3] == 7 && binary.BigEndian.Uint32(frame[13:]) == 0xc
}

// refusedByTLS is the error of a handshake that no retry changes; nil: one may.
func refusedByTLS(err error) *Error {
	var (
		record   tls.RecordHeaderError
		distrust *tls.CertificateVerificationError
		network  net.Error
		alert    *net.OpError
	)
	switch {
	case err == nil || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		return nil
	case errors.As(err, &record):
		return newError(Denied, "the server does not speak TLS here")
	case errors.As(err, &distrust):
		return newError(Denied, "TLS: the server's certificate %s", whyDistrusted(distrust.Err))
	case errors.As(err, &alert) && alert.Op == "remote error":
		return newError(Denied, "TLS: %s", meaning(strings.TrimPrefix(alert.Err.Error(), "tls: ")))
	case errors.As(err, &network) || errors.Is(err, context.Canceled):
		return nil
	}
	return newError(Denied, "TLS: %s", printable(strings.TrimPrefix(err.Error(), "tls: ")))
}

// meaning explains an alert of the server.
func meaning(alert string) string {
	switch {
	case alert == "certificate required":
		return "the server asks for a client's certificate (TLSFiles)"
	case strings.Contains(alert, "certificate") || alert == "access denied":
		return fmt.Sprintf("the server does not accept the client's certificate (%s)", alert)
	}
	return fmt.Sprintf("client and server have nothing in common (%s)", alert)
}

func whyDistrusted(err error) string {
	var (
		name    x509.HostnameError
		unknown x509.UnknownAuthorityError
		invalid x509.CertificateInvalidError
	)
	switch {
	case errors.As(err, &name):
		names := name.Certificate.DNSNames
		for _, ip := range name.Certificate.IPAddresses {
			names = append(names, ip.String())
		}
		for _, uri := range name.Certificate.URIs {
			names = append(names, uri.String())
		}
		return fmt.Sprintf("is for %s, not for %s", printable(strings.Join(names, ", ")), name.Host)
	case errors.As(err, &unknown):
		return "was not signed by a CA of Options.TLS"
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired && time.Now().Before(invalid.Cert.NotBefore):
		return "is not valid yet"
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return "has expired"
	}
	return "is not accepted: " + printable(err.Error())
}

// printable replaces what a terminal may act on.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, text)
}
