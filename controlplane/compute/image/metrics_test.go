package image

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/metricstest"
)

// TestMetrics checks the number, the size and the copies of images in the metrics, by status.
func TestMetrics(t *testing.T) {
	w := newWorld(t, 3)
	put := func(i cloud.Image) {
		_, err := w.records.Update(t.Context(), func(tx *store.Tx) error { Images.Put(tx, &i, string(i.ID)); return nil })
		require.NoError(t, err)
	}
	put(cloud.Image{ID: "a", Status: cloud.ImageAvailable, SizeBytes: 100, Holders: []uint64{1, 2, 3}})
	put(cloud.Image{ID: "b", Status: cloud.ImageAvailable, SizeBytes: 20, Holders: []uint64{2}})
	put(cloud.Image{ID: "c", Status: cloud.ImageUploading, SizeBytes: 7, Holders: []uint64{1}})
	put(cloud.Image{ID: "d", Status: cloud.ImageError})
	put(cloud.Image{ID: "new", Status: cloud.ImageError + 1}) // of a member of another version; its text is ERROR

	collector := NewCollector(w.records)
	gather := func() map[string]float64 { return metricstest.Values(t, collector) }
	want := map[string]float64{
		"trivet_images AVAILABLE": 2, "trivet_image_bytes AVAILABLE": 120, "trivet_image_copies AVAILABLE": 4,
		"trivet_images UPLOADING": 1, "trivet_image_bytes UPLOADING": 7, "trivet_image_copies UPLOADING": 1,
		"trivet_images ERROR": 2, "trivet_image_bytes ERROR": 0, "trivet_image_copies ERROR": 0,
		"trivet_images PENDING": 0, "trivet_image_bytes PENDING": 0, "trivet_image_copies PENDING": 0,
	}
	require.Equal(t, want, gather())
	put(cloud.Image{ID: "e", Status: cloud.ImagePending})
	w.pass(29 * time.Second)
	require.Equal(t, want, gather(), "all images were read again before 30 seconds had passed")
	w.pass(time.Second)
	require.EqualValues(t, 1, gather()["trivet_images PENDING"])
}
