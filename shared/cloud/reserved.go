package cloud

import (
	"maps"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// ReservedPrefix is the prefix of the keys of metadata and labels that Trivet defines. All other keys belong to the
// users.
const ReservedPrefix = "trivet/"

// volumeMetadata are the keys of the metadata of a volume with ReservedPrefix that callers may set, sorted.
var volumeMetadata = []string{MaxBytesPerSecond, MaxIOPS, SnapshotEvery, SnapshotKeep}

// imageMetadata are the keys of the metadata of an image with ReservedPrefix that callers may set, sorted.
var imageMetadata = []string{SharedWith, SourceSHA256, SourceSHA512}

// UnknownKey returns the first key of pairs, in alphabetical order, that begins with ReservedPrefix and is not in known,
// or "". Callers refuse such a key, because a misspelt key would have no effect, and nobody would notice. UnknownKey
// accepts keys with an empty value, which removes the key. UnknownKey also accepts the keys of present, the pairs that
// the object already has, because another version may have known them.
func UnknownKey(pairs, present map[string]string, known []string) string {
	for _, key := range slices.Sorted(maps.Keys(pairs)) {
		if !strings.HasPrefix(key, ReservedPrefix) || pairs[key] == "" || slices.Contains(known, key) {
			continue
		}
		if _, ok := present[key]; !ok {
			return key
		}
	}
	return ""
}

// CheckVolumeKeys returns InvalidArgument if the metadata or the labels of a request for a volume set a key that begins
// with ReservedPrefix and is unknown. before is the volume that the request changes, or an empty one for a new volume.
func CheckVolumeKeys(metadata, labels map[string]string, before *Volume) error {
	if err := checkReserved("metadata", metadata, before.Metadata, volumeMetadata); err != nil {
		return err
	}
	return checkReserved("labels", labels, before.Labels, nil)
}

// CheckImageKeys returns InvalidArgument if the metadata of a request for an image sets a key that begins with
// ReservedPrefix and is unknown. present is the metadata of the image that the request changes, or nil for a new image.
func CheckImageKeys(metadata, present map[string]string) error {
	return checkReserved("metadata", metadata, present, imageMetadata)
}

func checkReserved(field string, pairs, present map[string]string, known []string) error {
	key := UnknownKey(pairs, present, known)
	switch {
	case key == "":
		return nil
	case len(known) == 0:
		return fault.Invalid(field, "%s is unknown: keys that begin with %s are reserved, and no such key is for %s", key, ReservedPrefix, field)
	}
	return fault.Invalid(field, "%s is unknown: the keys that begin with %s are %s", key, ReservedPrefix, strings.Join(known, ", "))
}
