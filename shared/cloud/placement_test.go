package cloud_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

func TestNodeSelector(t *testing.T) {
	for text, want := range map[string]map[string]string{
		"":                     nil,
		"rack=a":               {"rack": "a"},
		"disk=ssd,rack=":       {"disk": "ssd", "rack": ""},
		"a=b=c,trivet/host=h1": {"a": "b=c", cloud.HostLabel: "h1"},
	} {
		got, err := cloud.ParseNodeSelector(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
		require.Equal(t, text, cloud.FormatNodeSelector(got))
	}
	for _, text := range []string{"ssd", "=x", "a=b,"} {
		_, err := cloud.ParseNodeSelector(text)
		require.ErrorContains(t, err, "k=v", text)
	}
}
