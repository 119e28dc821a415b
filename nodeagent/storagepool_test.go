package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestStoragePoolSettings(t *testing.T) {
	pools, err := parsePools("local=/srv/local,nfs=/mnt/nfs:shared")
	require.NoError(t, err)
	require.Equal(t, []StoragePool{{Name: "local", Path: "/srv/local"}, {Name: "nfs", Path: "/mnt/nfs", Shared: true}}, pools)
	c := Config{StoragePools: pools}
	require.NoError(t, c.validateStorage())
	_, err = parsePools("local")
	require.ErrorContains(t, err, "is not name=path")

	for text, want := range map[string]string{
		"Local=/a": "the name", "a=b": "absolute", "a=/b/": "shortest", "a=/b,a=/c": "another pool", "a=/b,c=/b": "another pool",
	} {
		c.StoragePools, err = parsePools(text)
		require.NoError(t, err)
		require.ErrorContains(t, c.validateStorage(), want, text)
	}
	c.StoragePools = make([]StoragePool, maxPools+1)
	require.ErrorContains(t, c.validateStorage(), "more than 64")
}
