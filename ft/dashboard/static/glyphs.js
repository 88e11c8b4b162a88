// A symbol for each state and lane, so that no meaning depends on colour only.

export const GLYPHS = {
  training: "✓", waiting: "…", joining: "+", healing: "↻", late: "!", silent: "?", "sitting out": "‖", left: "−", lost: "✕",
};
export const LANE_GLYPHS = { membership: "◆", heal: "↻", commit: "▲", corruption: "■", storage: "●", settings: "✎" };
