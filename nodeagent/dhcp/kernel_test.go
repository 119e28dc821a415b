package dhcp

import "log/slog"

var discardLog = slog.New(slog.DiscardHandler)
