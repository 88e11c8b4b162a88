// A sign beside each colour, so that neither needs the other.

export const GLYPHS = {
  training: "✓", waiting: "…", joining: "+", healing: "↻", late: "!", silent: "?", "sitting out": "‖", left: "−", lost: "✕",
};
export const LANE_GLYPHS = { membership: "◆", heal: "↻", commit: "▲", corruption: "■", storage: "●" };
