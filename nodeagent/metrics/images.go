package metrics

import "github.com/prometheus/client_golang/prometheus"

// Images is the image cache of this host. The counters count events since the agent started.
type Images struct {
	Images       int
	Bytes, Limit int64
	// Fetches includes the failed fetches.
	Fetches, FetchFailures, FetchedBytes uint64
	Evictions                            uint64
}

var (
	cacheImages    = desc("image_cache_images", "Images in the cache of the host.")
	cacheBytes     = desc("image_cache_bytes", "Disk space that the image cache uses.")
	cacheLimit     = desc("image_cache_limit_bytes", "Maximum size of the image cache; 0 until the agent has checked the size for the first time.")
	cacheFetches   = desc("image_fetches_total", "Fetches of images from members, by result.", "result")
	cacheFetched   = desc("image_fetched_bytes_total", "Bytes of images that were fetched from members.")
	cacheEvictions = desc("image_cache_evictions_total", "Unused images that were removed to keep the limit of the cache.")
)

var imageDescs = []*prometheus.Desc{cacheImages, cacheBytes, cacheLimit, cacheFetches, cacheFetched, cacheEvictions}

func collectImages(i Images, gauge, counter func(*prometheus.Desc, float64, ...string)) {
	gauge(cacheImages, float64(i.Images))
	gauge(cacheBytes, float64(i.Bytes))
	gauge(cacheLimit, float64(i.Limit))
	counter(cacheFetches, float64(i.Fetches-i.FetchFailures), "ok")
	counter(cacheFetches, float64(i.FetchFailures), "failed")
	counter(cacheFetched, float64(i.FetchedBytes))
	counter(cacheEvictions, float64(i.Evictions))
}
