package cloud_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

func TestBaselineCPU(t *testing.T) {
	haswell := []string{"Haswell-v4", "Nehalem-v1", "Westmere-v1", "host", "max", "qemu64-v1"}
	milan := []string{"EPYC-Milan-v1", "EPYC-v3", "Nehalem-v1", "host", "max", "qemu64-v1"}
	tcg := []string{"Nehalem-v1", "max", "qemu64-v1"}
	for name, c := range map[string]struct {
		offers [][]string
		want   string
	}{
		"no hosts":                              {nil, ""},
		"hosts that offer nothing":              {[][]string{{}, nil}, ""},
		"one host":                              {[][]string{haswell}, "Haswell-v4"},
		"equal hosts":                           {[][]string{milan, milan}, "EPYC-Milan-v1"},
		"two vendors":                           {[][]string{haswell, milan}, "Nehalem-v1"},
		"a host that offers nothing is ignored": {[][]string{haswell, nil}, "Haswell-v4"},
		"only emulation":                        {[][]string{tcg, tcg}, "max"},
		"emulation and KVM":                     {[][]string{tcg, haswell}, "Nehalem-v1"},
		"nothing in common":                     {[][]string{{"Haswell-v4", "host"}, {"EPYC-v3", "host"}}, ""},
		"only models without a fixed set":       {[][]string{{"host", "max"}, {"host", "max"}}, ""},
		"names without a version are ignored":   {[][]string{{"Haswell", "host"}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			before := slices.Clone(c.offers)
			require.Equal(t, c.want, cloud.BaselineCPU(c.offers))
			require.Equal(t, before, c.offers)
			slices.Reverse(c.offers)
			require.Equal(t, c.want, cloud.BaselineCPU(c.offers), "the order of the hosts must not matter")
		})
	}
}
