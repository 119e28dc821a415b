package store_test

import (
	"testing"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/controlplane/store/storetest"
)

func TestMemory(t *testing.T) {
	storetest.Run(t, func(t *testing.T, now func() time.Time) *store.Store { return storetest.Memory(t, now) })
}
