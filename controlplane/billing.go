package main

import (
	"log/slog"

	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/controlplane/money/billing"
	"github.com/trivet-cloud/trivet/controlplane/money/credit"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
)

// billingOf is what the VM controller tells of its VMs: nobody when they cost nothing.
func billingOf(b config.Billing, s *billing.Service) vm.Billing {
	if !b.Enabled {
		return nil
	}
	return s
}

func newBilling(b config.Billing, records *store.Store, credits *credit.Service, log *slog.Logger) *billing.Service {
	log = log.With("service", "billing")
	if b.Enabled && b.TestHour != 0 {
		log.Warn("TEST: an hour is charged for every "+b.TestHour.String(), "setting", "billing.test_hour")
	}
	return billing.New(billing.Options{Store: records, Credits: credits, Log: log, Rules: b.Rules()})
}
