//go:build mutant

package mutanttest

import (
	"strings"
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Noticed fails t unless the story passes without a mutant and fails with the named one. Tests that call Noticed must
// not run in parallel, because one mutant is active in the whole process.
func Noticed(t *testing.T, name string, story func(t testing.TB)) {
	t.Helper()
	t.Cleanup(func() { mutant.Set("") })
	mutant.Set("")
	if failed, texts := Fails(t, story); failed {
		t.Errorf("without the mutant %s the story fails:\n%s", name, strings.Join(texts, "\n"))
		return
	}
	mutant.Set(name)
	failed, texts := Fails(t, story)
	mutant.Set("")
	if !failed {
		t.Errorf("the story does not notice the mutant %s", name)
		return
	}
	t.Logf("%s is noticed:\n%s", name, strings.Join(texts, "\n"))
}
