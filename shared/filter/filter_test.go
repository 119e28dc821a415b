package filter

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/fault"
)

type record struct {
	name   string
	tags   []string
	state  string
	size   uint64
	at     int64
	labels map[string]string
}

var fields = map[string]Field[record]{
	"name":   Text(func(r record) string { return r.name }),
	"tag":    Texts(func(r record) []string { return r.tags }),
	"state":  Word("STATE_", []string{"ON", "OFF"}, func(r record) string { return r.state }),
	"size":   Number(map[string]float64{"K": 1000}, func(r record) float64 { return float64(r.size) }),
	"at":     Time(func(r record) int64 { return r.at }),
	"method": Name("Get", func(name string) bool { return name == "Get" || name == "Put" }, func(r record) []string { return []string{r.state, "Get"} }),
	"labels": Pairs(func(r record) map[string]string { return r.labels }),
}

func TestOperators(t *testing.T) {
	r := record{"web-1", []string{"a", "bc"}, "ON", 1500, 1000, map[string]string{"env": "prod", "a/b": "", "n": "10"}}
	for text, want := range map[string]bool{
		`name = "web-1"`: true, `name = "web"`: false, `name = "web*"`: true, `name = "*-1"`: true, `name = "*b-*"`: true, `name != "w*"`: false,
		`name = "*"`: true, `name < x`: true, `name > x`: false, `name >= "web-1"`: true, `name : eb`: true, `name : bo`: false, `name:*`: true,
		`method = Get`: true, `method != Get`: false, `method = Put`: false, `method = "G*"`: true, `method : et`: true, `method : none`: false,
		`tag = a`: true, `tag : bc`: true, `tag != a`: false, `tag = "b*"`: true, `tag = b`: false,
		`state = on`: true, `state = STATE_ON`: true, `state : OFF`: false, `state != OFF`: true,
		`size = 1500`: true, `size != 1500`: false, `size > 1`: true, `size < 1.5`: false, `size >= "1.5K"`: true, `size <= "2 K"`: true, `size < -1`: false,
		`at = "1970-01-01T00:00:01Z"`: true, `at > "1970-01-01"`: true, `at > "1970-01-01T01:00:01+01:00"`: false,
		`labels.env = prod`: true, `labels.env : ro`: true, `labels.none:*`: false, `labels:"a/b"`: true, `labels."a/b":*`: true, `labels.n > 1`: true,
		`labels.none = ""`: true, `labels.env = "p*"`: true, `labels.n = 10`: true,
		`name = x OR size > 1 AND tag = a`: true, `NOT (name = x) -tag = b`: true,
	} {
		m, err := Compile(text, fields)
		require.NoError(t, err, text)
		require.Equal(t, want, m(r), text)
	}
}

// TestUnsetTime checks that a time which is unset is unequal to every value, and neither before nor after one.
func TestUnsetTime(t *testing.T) {
	for text, want := range map[string]bool{
		`at < "2026-03-01"`: false, `at <= "1970-01-01"`: false, `at = "1970-01-01"`: false, `at > "1960-01-01"`: false, `at >= "1970-01-01"`: false,
		`at != "2026-03-01"`: true, `NOT at < "2026-03-01"`: true,
	} {
		m, err := Compile(text, fields)
		require.NoError(t, err, text)
		require.Equal(t, want, m(record{}), text)
	}
}

// TestNamesWithDots checks that the longest name which begins a path is the field, and that the rest is a key.
func TestNamesWithDots(t *testing.T) {
	inner := map[string]Field[record]{
		"spec.size": Number(nil, func(r record) float64 { return float64(r.size) }), "spec.labels": fields["labels"], "spec": fields["labels"],
	}
	r := record{size: 3, labels: map[string]string{"env": "prod", "a.b": "x"}}
	for text, want := range map[string]bool{
		`spec.size = 3`: true, `spec.labels.env = prod`: true, `spec.labels.a.b = x`: true, `spec.labels.none:*`: false, `spec.env = prod`: true,
	} {
		m, err := Compile(text, inner)
		require.NoError(t, err, text)
		require.Equal(t, want, m(r), text)
	}
	_, err := Compile(`spec.size.x = 3`, inner)
	require.ErrorContains(t, err, "unknown field spec.size.x: spec.size has no parts")
}

func TestErrorsNameTheField(t *testing.T) {
	for text, want := range map[string]string{
		`nome = "x"`:     "unknown field nome; one of at, labels.<key>, method, name, size, state, tag",
		`name.x = y`:     "unknown field name.x: name has no parts",
		`labels = x`:     "name the key: labels.<key>",
		`state = FLYING`: "state = FLYING: state is one of ON, OFF, with = or !=",
		`state > ON`:     "state > ON: state is one of ON, OFF, with = or !=",
		`size = big`:     `size = big: size is a number or a text such as "4GiB", with =, !=, <, <=, > or >=`,
		`size : 1`:       `size : 1: size is a number`,
		`at < tomorrow`:  `at < tomorrow: at is a time such as "2026-03-01T12:00:00Z"`,
		`tag > a`:        "tag > a: tag is a list of texts, with =, != or :",
		`name`:           `want comparisons such as name = "web"`,
		`now() = x`:      "the left side of = must be a field",
		`name = now()`:   "name is compared with a word, a number or a string",
		`size = "NaN"`:   "size = NaN",
		`name = `:        "cannot be parsed",
		`name = "x`:      "cannot be parsed",
		`name = x) OR (`: "cannot be parsed",
	} {
		_, err := Compile(text, fields)
		require.True(t, fault.Is(err, fault.InvalidArgument), text)
		require.ErrorContains(t, err, want, text)
	}
}
