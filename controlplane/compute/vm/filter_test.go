package vm

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func TestFilter(t *testing.T) {
	vm := &cloud.VM{ID: "i", Name: "web-1", State: cloud.Running, Node: "n1", Labels: map[string]string{"env": "prod", "a/b": "c", "tier": "2"}}
	for text, want := range map[string]bool{
		"":                                      true,
		"  ":                                    true,
		`name = "web-1"`:                        true,
		`name != "web-1"`:                       false,
		`state = RUNNING`:                       true,
		`state = running`:                       true,
		`state = VM_STATE_RUNNING`:              true,
		`state = STOPPED`:                       false,
		`state = RUNNING AND labels.env="prod"`: true,
		`state = STOPPED OR labels.env = prod`:  true,
		`NOT state = STOPPED`:                   true,
		`-state = RUNNING`:                      false,
		`(state = STOPPED OR name = "web-1") AND labels.env != "dev"`: true,
		`labels:env`:          true,
		`labels:nothing`:      false,
		`labels.env:*`:        true,
		`labels."a/b" = "c"`:  true,
		`labels.tier = "2"`:   true,
		`labels.none = "x"`:   false,
		`labels.none != "x"`:  true,
		`node_id = "n1"`:      true,
		`id = "i" name = "x"`: false,
	} {
		m, err := parseFilter(text)
		require.NoError(t, err, text)
		require.Equal(t, want, m(vm), text)
	}
}

func TestBadFilter(t *testing.T) {
	for _, text := range []string{
		`name =`, `= "x"`, `name`, `"x"`, `name > "a"`, `owner = "x"`, `state = FLYING`, `labels = "x"`, `name = (`, `name.x = "y"`,
		`f(name) = "x"`, `name = 'x`, strings.Repeat("(", 5000), strings.Repeat("(", 100) + `name="x"` + strings.Repeat(")", 100),
		strings.Repeat("x", cloud.MaxFilter+1),
	} {
		_, err := parseFilter(text)
		require.True(t, fault.Is(err, fault.InvalidArgument), "%q: %v", text, err)
		require.ErrorContains(t, err, "filter")
	}
}

// TestHostileFilters parses and evaluates filters that are made to be expensive. Each must be refused, or not match.
// The length of a filter and its number of parentheses are limited, which limits the work.
func TestHostileFilters(t *testing.T) {
	vm := &cloud.VM{ID: "i", Name: "web-1", Labels: map[string]string{"a": "b"}}
	for name, text := range map[string]string{
		"deep nesting":                     strings.Repeat("(", 900) + `name="x"` + strings.Repeat(")", 900),
		"300 terms":                        strings.TrimSuffix(strings.Repeat(`name = "x" OR `, 300), " OR "),
		"a field path of 900 parts":        strings.TrimSuffix(strings.Repeat("a.", 900), ".") + ` = "x"`,
		"a chain of NOT":                   strings.Repeat("NOT ", 400) + `name = "x"`,
		"a chain of minuses":               strings.Repeat("-", 900) + `name = "x"`,
		"a value with many escapes":        `name = "` + strings.Repeat(`\\\"`, 300) + `"`,
		"not UTF-8":                        "name = \"\xff\xfe\"",
		"a NUL":                            "name = \"a\x00b\"",
		"a string without a closing quote": `name = "` + strings.Repeat("x", 900),
	} {
		m, err := parseFilter(text)
		if err != nil {
			require.True(t, fault.Is(err, fault.InvalidArgument), "%s: %v", name, err)
			continue
		}
		require.False(t, m(vm), name)
	}
}

func FuzzFilter(f *testing.F) {
	f.Add(`state = RUNNING AND labels.env = "prod"`)
	f.Add(`NOT (name = "a" OR labels:x)`)
	f.Fuzz(func(t *testing.T, text string) {
		m, err := parseFilter(text)
		if err != nil {
			require.True(t, fault.Is(err, fault.InvalidArgument))
			return
		}
		m(&cloud.VM{})
	})
}
