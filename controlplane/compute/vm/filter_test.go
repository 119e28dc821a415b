package vm

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func TestFilter(t *testing.T) {
	at := time.Date(2026, 2, 3, 0, 0, 0, 0, time.UTC).UnixMilli()
	vm := &cloud.VM{
		ID: "i", Name: "web-1", State: cloud.Running, Node: "n1", Labels: map[string]string{"env": "prod", "a/b": "c", "tier": "2"},
		Metadata: map[string]string{"role": "db"}, CreatedBy: "ada", CreatedAt: at, UpdatedAt: at,
		Spec: cloud.Spec{
			CPU: &cloud.CPU{VCPUs: 2}, Memory: &cloud.Memory{SizeMiB: 4096},
			Disks: []cloud.Disk{{Image: "img", SizeGiB: 10}, {SizeGiB: 20}, {Volume: "vol"}},
		},
		Status: cloud.Status{LastError: "disk is full", Addresses: []string{"10.0.0.5"}},
	}
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
		`labels:env`:                     true,
		`address = "10.0.0.*"`:           true,
		`address != "10.0.0.5"`:          false,
		`host_id = n1 AND creator = ada`: true,
		`error : full`:                   true,
		`created = "2026-02-03"`:         true,
		`age > "2026-02-03"`:             false,
		`NOT (labels.env = "prod")`:      false,
		`NOT (labels.none = "prod")`:     true,
		`NOT labels."none":*`:            true,
		`(labels."env" = "x" OR labels."env" = "prod") AND NOT (labels."tier" = "3")`: true,
		`labels:nothing`:                      false,
		`labels.env:*`:                        true,
		`labels."a/b" = "c"`:                  true,
		`labels.tier = "2"`:                   true,
		`labels.none = "x"`:                   false,
		`labels.none != "x"`:                  true,
		`node_id = "n1"`:                      true,
		`id = "i" name = "x"`:                 false,
		`name : web`:                          true,
		`name = "web*"`:                       true,
		`vcpus > 1`:                           true,
		`vcpus >= 3`:                          false,
		`memory > 1`:                          true,
		`memory = "4GiB"`:                     true,
		`memory < 4096`:                       false,
		`disk >= 30`:                          true,
		`disk > "1TiB"`:                       false,
		`image_id = "img"`:                    true,
		`volume_id : "vol"`:                   true,
		`volume_id = "img"`:                   false,
		`created_by = ada`:                    true,
		`last_error : full`:                   true,
		`ip_addresses:"10.0.0.5"`:             true,
		`ip_addresses = "10.0.1.*"`:           false,
		`metadata.role = db`:                  true,
		`labels.tier > 1`:                     true,
		`created_at > "2026-01-01"`:           true,
		`updated_at < "2026-01-01T00:00:00Z"`: false,
		`started_at = "1970-01-01T00:00:00Z"`: false, `started_at != "1970-01-01T00:00:00Z"`: true,
	} {
		m, err := parseFilter(text)
		require.NoError(t, err, text)
		require.Equal(t, want, m(vm), text)
	}
}

func TestBadFilter(t *testing.T) {
	for _, text := range []string{
		`name =`, `= "x"`, `name`, `"x"`, `owner = "x"`, `memory > "big"`, `memory : 1`, `state > RUNNING`, `created_at = yesterday`,
		`ip_addresses > "1"`, `state = FLYING`, `labels = "x"`, `name = (`, `name.x = "y"`,
		`f(name) = "x"`, `name = 'x`, strings.Repeat("(", 5000), strings.Repeat("(", 100) + `name="x"` + strings.Repeat(")", 100),
		strings.Repeat("x", 4<<10+1),
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
