//go:build unix

package fastps

import (
	"io/fs"
	"syscall"
)

// isPrivate reports whether only its owner can read a file. A group may read a file of root, as Kubernetes mounts secrets.
func isPrivate(about fs.FileInfo) bool {
	byOthers := fs.FileMode(0o077)
	if owner, ok := about.Sys().(*syscall.Stat_t); ok && owner.Uid == 0 {
		byOthers = 0o037
	}
	return about.Mode()&byOthers == 0
}
