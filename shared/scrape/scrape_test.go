package scrape

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestURL checks the URL that Port.URL returns for Prometheus, and that CheckURL accepts it from a host.
func TestURL(t *testing.T) {
	own := func() (string, error) { return "10.0.1.1", nil }
	for _, c := range []struct {
		port Port
		want string
	}{
		{Port{}, ""},
		{Port{Address: "rack-1:80"}, ""},
		{Port{Listen: "10.0.1.7:7444"}, "http://10.0.1.7:7444"},
		{Port{Listen: "10.0.1.7:7444", Cert: "/c", Key: "/k"}, "https://10.0.1.7:7444"},
		{Port{Listen: "127.0.0.1:7444"}, ""},
		{Port{Listen: "localhost:7444"}, ""},
		{Port{Listen: "[::1]:7444"}, ""},
		{Port{Listen: "127.0.0.1:7444", Address: "rack-1.example:9000"}, "http://rack-1.example:9000"},
		{Port{Listen: "0.0.0.0:7444"}, "http://10.0.1.1:7444"},
		{Port{Listen: "[::]:7444"}, "http://10.0.1.1:7444"},
		{Port{Listen: ":7444"}, "http://10.0.1.1:7444"},
		{Port{Listen: "[2001:db8::1]:7444"}, "http://[2001:db8::1]:7444"},
	} {
		got, err := c.port.URL(own)
		require.NoError(t, err)
		require.Equal(t, c.want, got, "%+v", c.port)
		require.NoError(t, CheckURL(got))
	}
	got, err := Port{Listen: ":7444"}.URL(func() (string, error) { return "0.0.0.0", nil })
	require.NoError(t, err)
	require.Empty(t, got, "no address of the port is known")
	_, err = Port{Listen: ":7444"}.URL(func() (string, error) { return "", errors.New("no route") })
	require.ErrorContains(t, err, "no route")
	for _, bad := range []string{"10.0.1.1:7444", "ftp://h:1", "http://h", "http://:1", "http://h:1/metrics", "http://h:1?x=1", "http://u@h:1", "http://h:1 "} {
		require.Error(t, CheckURL(bad), bad)
	}
}

// TestValidate checks which settings are refused.
func TestValidate(t *testing.T) {
	for _, c := range []struct {
		port Port
		text string
	}{
		{Port{}, ""},
		{Port{Listen: "127.0.0.1:1", Token: "/t"}, ""},
		{Port{Listen: "10.0.0.1:1", Token: "/t", Cert: "/c", Key: "/k", Address: "h:1"}, ""},
		{Port{Listen: "10.0.0.1:1", Token: "/t"}, "metrics_token: set metrics_cert"},
		{Port{Listen: "0.0.0.0:1", Token: "/t"}, "metrics_token: set metrics_cert"},
		{Port{Listen: "10.0.0.1"}, "metrics_listen"},
		{Port{Cert: "/c"}, "set both or neither"},
		{Port{Address: "h"}, "metrics_address"},
		{Port{Address: ":1"}, "metrics_address"},
	} {
		err := c.port.Validate()
		if c.text == "" {
			require.NoError(t, err, "%+v", c.port)
			continue
		}
		require.ErrorContains(t, err, c.text, "%+v", c.port)
	}
}
