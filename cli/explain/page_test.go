package explain

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/shared/fault"
)

const root = "../.."

// TestErrorsPage compares the tables of docs/errors.md with the exit codes of this package, with the table in package
// fault, and with the reasons in the code of the control plane.
func TestErrorsPage(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "docs", "errors.md"))
	require.NoError(t, err)
	codesOfPage, reasons := map[string][]string{}, map[string]string{}
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.TrimSpace(line), " | ")
		name := strings.TrimPrefix(cells[0], "| ")
		switch {
		case !regexp.MustCompile(`^[A-Z_]+$`).MatchString(name):
		case len(cells) == 5:
			codesOfPage[name] = cells[1:3]
		case len(cells) == 4:
			require.NotContains(t, reasons, name, "listed twice")
			reasons[name] = cells[1]
		}
	}
	for c := codes.Canceled; c <= codes.Unauthenticated; c++ {
		if statuses := httpStatuses(c); statuses != "" {
			name := code.Code(c).String()
			require.Equal(t, []string{strconv.Itoa(exitCode(c)), statuses}, codesOfPage[name], name)
			delete(codesOfPage, name)
		}
	}
	require.Empty(t, codesOfPage, "the page lists codes that no fault has")
	code, used := source(t), map[string]bool{}
	for _, r := range usedReasons(code) {
		used[r] = true
		require.Contains(t, reasons, r, "docs/errors.md does not list this reason")
	}
	require.Greater(t, len(used), 90)
	for r := range reasons {
		require.True(t, strings.Contains(code, strconv.Quote(r)), "docs/errors.md lists %s, which no code has", r)
	}
	for r := range hints {
		require.Contains(t, reasons, r)
	}
}

// httpStatuses returns the HTTP statuses that the REST services use for a code, sorted and separated by commas.
func httpStatuses(c codes.Code) string {
	var all []string
	for k := fault.Internal; k <= fault.Throttled; k++ {
		if k.RPC() != c {
			continue
		}
		for s := fault.VM; s <= fault.Network; s++ {
			all = append(all, fmt.Sprint(k.REST(s).Status))
		}
	}
	slices.Sort(all)
	return strings.Join(slices.Compact(all), ", ")
}

// source returns the code of the control plane and of the shared packages.
func source(t *testing.T) string {
	var b strings.Builder
	for _, dir := range []string{"controlplane", "shared"} {
		require.NoError(t, filepath.WalkDir(filepath.Join(root, dir), func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			b.Write(text)
			return err
		}))
	}
	return b.String()
}

// usedReasons returns the reasons that are given to faults, as texts or as constants.
func usedReasons(code string) (all []string) {
	constants := map[string][]string{}
	for _, m := range regexp.MustCompile(`(\w+) *= *"([A-Z_]+)"`).FindAllStringSubmatch(code, -1) {
		constants[m[1]] = append(constants[m[1]], m[2])
	}
	for _, m := range regexp.MustCompile(`WithReason\((?:"([A-Z_]+)"|(?:\w+\.)?(\w+))\)`).FindAllStringSubmatch(code, -1) {
		if m[1] != "" {
			all = append(all, m[1])
		}
		all = append(all, constants[m[2]]...)
	}
	return all
}
