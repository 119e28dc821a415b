package metadata

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestTree compares the trees with testdata/tree. The command walk prints all paths below a path, which it finds in the
// listings as a client does. The command get prints the content of one path.
func TestTree(t *testing.T) {
	table := testTable(t)
	datadriven.RunTest(t, "testdata/tree", func(t *testing.T, d *datadriven.TestData) string {
		vpc, from := "vpc-a", "10.0.0.5"
		d.MaybeScanArgs(t, "vpc", &vpc)
		d.MaybeScanArgs(t, "from", &from)
		i, ok := table(cloud.VPCID(vpc), netip.MustParseAddr(from))
		require.True(t, ok)
		var out strings.Builder
		for path := range strings.Lines(d.Input) {
			path = strings.TrimSpace(path)
			switch d.Cmd {
			case "walk":
				walk(t, &out, i, path)
			case "get":
				content, contentType, ok := resolve(i, path)
				if !ok {
					fmt.Fprintf(&out, "%s: not found\n", path)
					continue
				}
				fmt.Fprintf(&out, "%s: %s: %q\n", path, contentType, content)
			default:
				d.Fatalf(t, "unknown command %s", d.Cmd)
			}
		}
		return out.String()
	})
}

// walk prints a directory and everything below it.
func walk(t *testing.T, out *strings.Builder, i *Instance, path string) {
	content, _, ok := resolve(i, path)
	require.True(t, ok, path)
	fmt.Fprintf(out, "%s\n  %s\n", path, strings.ReplaceAll(strings.TrimSuffix(string(content), "\n"), "\n", "\n  "))
	if !strings.HasSuffix(path, "/") {
		return
	}
	for name := range strings.SplitSeq(string(content), "\n") {
		number, _, isKey := strings.Cut(name, "=")
		switch {
		case isKey:
			name = number + "/"
		case path == "/latest/" && (name == "dynamic" || name == "meta-data"):
			name += "/"
		}
		walk(t, out, i, path+name)
	}
}

// TestVersionsHaveTheSameTree reads a path of each version in the listing.
func TestVersionsHaveTheSameTree(t *testing.T) {
	i, ok := testTable(t)("vpc-a", netip.MustParseAddr("10.0.0.5"))
	require.True(t, ok)
	listing, _, ok := resolve(i, "/")
	require.True(t, ok)
	for version := range strings.SplitSeq(string(listing), "\n") {
		content, _, ok := resolve(i, "/"+version+"/meta-data/instance-id")
		require.True(t, ok, version)
		require.Equal(t, "web", string(content))
	}
}
