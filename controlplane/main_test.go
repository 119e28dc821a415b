package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
)

func TestKeygenMakesAKey(t *testing.T) {
	var out bytes.Buffer
	c := command()
	c.SetArgs([]string{"keygen"})
	c.SetOut(&out)
	require.NoError(t, c.Execute())
	_, err := clusterkey.Parse(out.String())
	require.NoError(t, err)
}
