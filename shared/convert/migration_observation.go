package convert

import (
	"slices"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func migrationObservation(m *cloud.MigrationObservation) *agentv1.MigrationObservation {
	if m == nil {
		return nil
	}
	return &agentv1.MigrationObservation{
		Attempt: m.Attempt, State: agentv1.MigrationState(m.State), Address: m.Address, Machine: slices.Clone(m.Machine),
		Error: m.Error, TotalBytes: m.TotalBytes, SentBytes: m.SentBytes, DowntimeMs: m.DowntimeMS,
		MemoryChannels: m.MemoryChannels,
	}
}

func migrationObservationFrom(m *agentv1.MigrationObservation) *cloud.MigrationObservation {
	if m == nil {
		return nil
	}
	return &cloud.MigrationObservation{
		Attempt: m.GetAttempt(), State: enum[cloud.MigrationState](m.GetState()), Address: m.GetAddress(),
		Machine: slices.Clone(m.GetMachine()), Error: m.GetError(), TotalBytes: m.GetTotalBytes(),
		SentBytes: m.GetSentBytes(), DowntimeMS: m.GetDowntimeMs(), MemoryChannels: m.GetMemoryChannels(),
	}
}
