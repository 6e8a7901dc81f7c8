//go:build unix

package fastps

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// Checksums of zlib.crc32.
var (
	zeros = "fps_" + strings.Repeat("0", 64) + "78107bdd"
	ones  = "fps_" + strings.Repeat("1", 64) + "06507244"
)

func TestATokenIsReadAgain(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(zeros + "\n")
	b, refusal := openBearer(file)
	if refusal != nil {
		t.Fatal(refusal)
	}
	shown := func(token string) {
		t.Helper()
		headers, _ := b.GetRequestMetadata(t.Context())
		if headers["authorization"] != "Bearer "+token {
			t.Fatal("another token is shown")
		}
	}
	shown(zeros)
	if b.hasNewerThan(zeros) {
		t.Fatal("the token has not changed")
	}
	write(ones)
	for range 2 { // also after another call has read it
		if !b.hasNewerThan(zeros) {
			t.Fatal("the token has changed")
		}
	}
	shown(ones)
	write(ones[:40])
	if b.hasNewerThan(ones) {
		t.Fatal("the last token stays in use")
	}
	shown(ones)
}

func TestATokenStaysOnThisMachineWithoutTLS(t *testing.T) {
	b := &bearer{token: zeros}
	for _, c := range []struct {
		address   string
		encrypted bool
		passes    bool
	}{
		{"10.0.0.1:7070", false, false},
		{"host-a:7070", false, false},
		{"10.0.0.1:7070", true, true},
		{"127.0.0.1:7070", false, true},
		{"[::1]:7070", false, true},
		{"unix:///run/fastps", false, true},
	} {
		if passes := b.check(c.address, c.encrypted) == nil; passes != c.passes {
			t.Errorf("%s, encrypted %v: passes %v", c.address, c.encrypted, passes)
		}
		if (*bearer)(nil).check(c.address, c.encrypted) != nil {
			t.Errorf("%s is refused without a token", c.address)
		}
	}
}

func TestFilesThatHaveNoTokenAreRefused(t *testing.T) {
	folder := t.TempDir()
	fifo := filepath.Join(folder, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	cases := map[string]string{fifo: "not a regular file", folder: "not a regular file", folder + "/absent": "cannot be read"}
	for text, says := range map[string]string{
		"":                               "starts with fps_",
		zeros[:30]:                       "76 characters",
		"fps_" + strings.Repeat("0", 72): "checksum",
		strings.ToUpper(zeros):           "starts with fps_",
		zeros + strings.Repeat(" ", 65):  "too large",
	} {
		file := filepath.Join(folder, says+text[:min(6, len(text))])
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		cases[file] = says
	}
	for file, says := range cases {
		_, err := openBearer(file)
		if err == nil || err.Kind != Config || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "0000") {
			t.Errorf("%s: %v", file, err)
		}
	}
	for mode, passes := range map[os.FileMode]bool{0o600: true, 0o400: true, 0o604: false, 0o660: false, 0o644: false} {
		file := filepath.Join(folder, "mode")
		if err := errors.Join(os.WriteFile(file, []byte(zeros), 0o600), os.Chmod(file, mode)); err != nil {
			t.Fatal(err)
		}
		_, err := openBearer(file)
		if (err == nil) != passes {
			t.Errorf("mode %o: %v", mode, err)
		}
		if err != nil && !strings.Contains(err.Error(), "chmod 600 "+file) {
			t.Errorf("mode %o: %v", mode, err)
		}
	}
}
