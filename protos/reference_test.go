package protos

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/trivet-cloud/trivet/shared/protodoc"
)

var rewrite = flag.Bool("rewrite", false, "write docs/api/grpc instead of comparing with it")

// internal lists the packages of RPCs that the programs of a cloud call, and users do not.
var internal = map[protoreflect.FullName]bool{"agent.v1": true, "member.v1": true, "peer.v1": true, "rbd.v1": true}

// TestReference checks that docs/api/grpc has the reference of each package for users, and nothing else.
func TestReference(t *testing.T) {
	files, err := protodoc.Load(".")
	require.NoError(t, err)
	const dir = "../docs/api/grpc"
	pages := map[string]string{}
	for _, f := range files.All {
		if !internal[f.Package()] {
			page, err := files.Reference(f.Package())
			require.NoError(t, err)
			pages[string(f.Package())+".md"] = page
		}
	}
	require.Greater(t, len(pages), 5, "the packages were not found")
	if *rewrite {
		require.NoError(t, os.RemoveAll(dir))
		require.NoError(t, os.MkdirAll(dir, 0o755))
		for name, page := range pages {
			require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(page), 0o644))
		}
		return
	}
	found, err := filepath.Glob(filepath.Join(dir, "*"))
	require.NoError(t, err)
	require.Len(t, found, len(pages), "run go test ./protos -rewrite")
	for name, page := range pages {
		text, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		require.True(t, string(text) == page, "%s is not up to date: run go test ./protos -rewrite", filepath.Join(dir, name))
	}
}

// TestReferenceLinks checks that the links between the pages lead to sections that exist.
func TestReferenceLinks(t *testing.T) {
	files, err := protodoc.Load(".")
	require.NoError(t, err)
	page, err := files.Reference("console.v1")
	require.NoError(t, err)
	require.Contains(t, page, "### CreateConsoleTicket\n\n`rpc CreateConsoleTicket(CreateConsoleTicketRequest) returns (CreateConsoleTicketResponse)`")
	require.Contains(t, page, "[CreateConsoleTicketRequest](#createconsoleticketrequest)")
	require.Contains(t, page, "\n### CreateConsoleTicketRequest\n")
	require.False(t, strings.Contains(page, "<nil>"))
	_, err = files.Reference("nothing.v1")
	require.ErrorIs(t, err, os.ErrNotExist)
}
