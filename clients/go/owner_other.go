//go:build !unix

package fastps

import "io/fs"

// isPrivate is true: access is not a matter of the file's mode.
func isPrivate(fs.FileInfo) bool { return true }
