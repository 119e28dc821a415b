package cloud

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestReservedKeys checks that unknown keys with the reserved prefix are refused for volumes, snapshots and images, and
// that keys that an object has already can be changed and removed.
func TestReservedKeys(t *testing.T) {
	pair := func(key string) map[string]string { return map[string]string{key: "1"} }
	old := pair("trivet/old")
	for name, c := range map[string]struct {
		err   error
		known bool
	}{
		"volume, misspelt key":          {CheckVolumeKeys(pair("trivet/max-iop"), nil, &Volume{}), false},
		"volume, key of a user":         {CheckVolumeKeys(pair("max-iop"), pair("a/trivet/"), &Volume{}), true},
		"volume, known key":             {CheckVolumeKeys(pair(MaxIOPS), nil, &Volume{}), true},
		"volume, label":                 {CheckVolumeKeys(nil, pair(MaxIOPS), &Volume{}), false},
		"volume, present key":           {CheckVolumeKeys(old, old, &Volume{Metadata: old, Labels: old}), true},
		"volume, removal of a key":      {CheckVolumeKeys(map[string]string{"trivet/old": ""}, nil, &Volume{}), true},
		"new volume":                    {CheckVolume(&Volume{Name: "data", SizeGiB: 1, Metadata: pair("trivet/max-iop")}), false},
		"image, misspelt key":           {CheckImageKeys(pair("trivet/share-with"), nil), false},
		"image, known key":              {CheckImageKeys(pair(SharedWith), nil), true},
		"image, present key":            {CheckImageKeys(old, old), true},
		"snapshot, misspelt key":        {CheckSnapshot("before", pair("trivet/keep")), false},
		"snapshot, label of the caller": {CheckSnapshot("before", pair("keep")), true},
	} {
		if c.known {
			require.NoError(t, c.err, name)
			continue
		}
		require.True(t, fault.Is(c.err, fault.InvalidArgument), "%s: %v", name, c.err)
		require.ErrorContains(t, c.err, "is unknown", name)
	}
	require.ErrorContains(t, CheckVolumeKeys(pair("trivet/x"), nil, &Volume{}), "the keys that begin with trivet/ are trivet/max-bytes-per-second, trivet/max-iops")
}
