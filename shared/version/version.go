// Package version has the version of the running program: Version for short texts, and Read with the version of Go and
// the platform.
//
// `make build` sets the version when it links the programs, with -ldflags "-X …/shared/version.stamped=1.2.3". A
// program that was built in another way has the version that the Go tool has recorded in it.
package version

import (
	"runtime"
	"runtime/debug"
)

// stamped is the version that the linker sets, or empty.
var stamped string

// Build describes how a program was built.
type Build struct {
	Version string `json:"version"`
	// Go is the version of the Go tool, such as go1.26.0.
	Go string `json:"go_version"`
	// Platform is the operating system and the architecture, such as linux/amd64.
	Platform string `json:"platform"`
}

// Version returns the version of the program, or "devel" if it is unknown.
func Version() string {
	recorded := ""
	if info, ok := debug.ReadBuildInfo(); ok {
		recorded = info.Main.Version
	}
	return choose(stamped, recorded)
}

// choose returns the version that the linker has set, or else that which the Go tool has recorded. The Go tool records
// "(devel)" if it knows no version.
func choose(stamped, recorded string) string {
	switch {
	case stamped != "":
		return stamped
	case recorded == "" || recorded == "(devel)":
		return "devel"
	}
	return recorded
}

// Read returns the build of the program.
func Read() Build {
	return Build{Version: Version(), Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
}

// Line returns one line of text about the build: the name of the program, its version, and in parentheses the version
// of Go and the platform.
func (b Build) Line(program string) string {
	return program + " " + b.Version + " (" + b.Go + ", " + b.Platform + ")"
}
