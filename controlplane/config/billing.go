package config

import (
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"github.com/trivet-cloud/trivet/controlplane/money/billing"
)

// Billing configures what VMs and volumes cost. Use the same values on all members; those of the leader apply.
type Billing struct {
	// Enabled makes projects pay for their VMs and volumes from their credit, by the hour. Creating one then reserves
	// credit. VMs and volumes that already exist when billing is enabled are charged from then on.
	Enabled bool           `yaml:"enabled"`
	Prices  billing.Prices `yaml:"prices"`
	// OnEmpty is the policy for running VMs whose next hour the project cannot pay. With the policy keep, the default,
	// such VMs continue to run and their hours are still counted. With the policy stop, they are stopped. Both policies
	// refuse new VMs.
	OnEmpty billing.Policy `yaml:"on_empty"`
	// TestHour is the length of a billed hour in tests, from 1s to 1h. 0 means one hour.
	TestHour time.Duration `yaml:"test_hour"`
}

// Rules returns the settings as billing.Rules, which package billing uses.
func (b *Billing) Rules() billing.Rules {
	return billing.Rules{Enabled: b.Enabled, Prices: b.Prices, OnEmpty: b.OnEmpty, Hour: b.TestHour}
}

// validate returns an error if a setting in Billing is out of range. The error names the first such setting.
func (b *Billing) validate() error {
	rules := b.Rules()
	if err := rules.Check(); err != nil {
		return fmt.Errorf("billing: %w", err)
	}
	return nil
}

// flags adds a flag for each setting in Billing to f.
func (b *Billing) flags(f *pflag.FlagSet) {
	f.BoolVar(&b.Enabled, "billing-enabled", b.Enabled, "charge projects for their VMs by the hour")
	f.Int64Var(&b.Prices.VCPUHour, "billing-vcpu-hour", b.Prices.VCPUHour, "credit for an hour of a vCPU of a running VM")
	f.Int64Var(&b.Prices.MemoryGiBHour, "billing-memory-gib-hour", b.Prices.MemoryGiBHour, "credit for an hour of a GiB of a running VM's memory")
	f.Int64Var(&b.Prices.DiskGiBHour, "billing-disk-gib-hour", b.Prices.DiskGiBHour, "credit for an hour of a GiB of a VM's disks, running or not")
	f.Int64Var(&b.Prices.VolumeGiBHour, "billing-volume-gib-hour", b.Prices.VolumeGiBHour, "credit for an hour of a GiB of a volume, attached or not")
	f.StringVar((*string)(&b.OnEmpty), "billing-on-empty", string(b.OnEmpty), "what happens to running VMs that are not paid for: keep (also when empty) or stop")
	f.DurationVar(&b.TestHour, "billing-test-hour", b.TestHour, "how long an hour is, for tests only")
	_ = f.MarkHidden("billing-test-hour")
}
