package fastps

import (
	"context"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
)

const (
	tokenPrefix   = "fps_"
	checksumChars = 8
	tokenChars    = len(tokenPrefix) + 64 + checksumChars
	maxTokenFile  = tokenChars + 64 // with white space around the token
)

// bearer shows the token of a file with each unary call and stream; nil shows none. It implements
// [credentials.PerRPCCredentials].
type bearer struct {
	file string

	mu    sync.Mutex
	token string
}

// openBearer reads the file; an empty name gives nil.
func openBearer(file string) (*bearer, *Error) {
	if file == "" {
		return nil, nil
	}
	token, err := readToken(file)
	if err != nil {
		return nil, err
	}
	return &bearer{file: file, token: token}, nil
}

// refresh reads the file again. The last token stays in use if it cannot be read.
func (b *bearer) refresh() {
	if b == nil {
		return
	}
	if token, err := readToken(b.file); err == nil {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.token = token
	}
}

// present returns the token that calls show; empty: none.
func (b *bearer) present() string {
	if b == nil {
		return ""
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.token
}

// hasNewerThan reads the file again after a call was refused, and reports whether the token now differs from the one
// that the call showed.
func (b *bearer) hasNewerThan(shown string) bool {
	b.refresh()
	return b.present() != shown
}

// check fails if the token would cross a network in plain text.
func (b *bearer) check(address string, encrypted bool) *Error {
	if b == nil || encrypted || isLocal(address) {
		return nil
	}
	return newError(Config, "a token is sent to other machines with TLS only, and nothing was sent").expected(
		"Options.TLS, or a server on 127.0.0.1, ::1 or localhost", address)
}

// GetRequestMetadata signs a call.
func (b *bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + b.present()}, nil
}

// RequireTransportSecurity is false for servers of this machine; [bearer.check] refuses the others.
func (b *bearer) RequireTransportSecurity() bool { return false }

// isToken reports whether a value that should be something else may be a token, which no error shows.
func isToken(value string) bool { return strings.HasPrefix(strings.TrimSpace(value), tokenPrefix) }

func readToken(file string) (string, *Error) {
	if isToken(file) {
		return "", newError(Config, "Options.TokenFile is a token").expected("the name of a file with the token", "a token")
	}
	text, err := readPrivate(file)
	if err != nil {
		return "", err
	}
	token := strings.TrimSpace(text)
	bad := newError(Config, "%s: not a token of fastps", file)
	switch {
	case !strings.HasPrefix(token, tokenPrefix):
		return "", bad.expected("text that starts with "+tokenPrefix, "other text")
	case len(token) != tokenChars:
		return "", bad.expected(fmt.Sprintf("%d characters", tokenChars), fmt.Sprintf("%d bytes", len(token)))
	}
	body, sum := token[:tokenChars-checksumChars], token[tokenChars-checksumChars:]
	if sum != fmt.Sprintf("%08x", crc32.ChecksumIEEE([]byte(body))) {
		return "", bad.expected("a token whose checksum is right", "one that was changed")
	}
	return token, nil
}

// readPrivate reads a small file that others than its owner cannot read. It does not wait for a FIFO.
func readPrivate(name string) (string, *Error) {
	file, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return "", newError(Config, "the token cannot be read: %v", err)
	}
	defer file.Close()
	about, err := file.Stat()
	switch {
	case err != nil:
		return "", newError(Config, "the token cannot be read: %v", err)
	case !about.Mode().IsRegular():
		return "", newError(Config, "the token cannot be read: %s is not a regular file", name)
	case !isPrivate(about):
		return "", newError(Config, "others than its owner can read %s: run chmod 600 %s", name, name).expected(
			"mode 600", fmt.Sprintf("%03o", about.Mode().Perm()))
	}
	bytes, err := io.ReadAll(io.LimitReader(file, int64(maxTokenFile+1)))
	switch {
	case err != nil:
		return "", newError(Config, "the token cannot be read: %v", err)
	case len(bytes) > maxTokenFile:
		return "", newError(Config, "%s is too large for a token", name).expected(
			fmt.Sprintf("at most %d bytes", maxTokenFile), "more")
	}
	return string(bytes), nil
}
